"""Gemma."""

from typing import Any

from lightning_megatron_rl.models.families.family import Family


def check(config: Any) -> None:
    """Refuse what there is no place for."""
    if config.use_bidirectional_attention or not config.tie_word_embeddings:
        raise ValueError(
            f"Gemma with use_bidirectional_attention={config.use_bidirectional_attention}, tie_word_embeddings="
            f"{config.tie_word_embeddings} is not supported: attention is causal, and there is no place for an output"
            " layer"
        )


FAMILY = Family(
    "gemma",
    "GemmaForCausalLM",
    ("megatron.bridge.models.gemma.gemma_bridge",),
    name="Gemma",
    attention="grouped queries",
    mlp="dense",
    refused="bidirectional attention, untied embeddings",
    activation=("hidden_act", "gelu_pytorch_tanh"),
    check=check,
    no_place_for=("attention_bias",),
    transformer_engine=False,
)
