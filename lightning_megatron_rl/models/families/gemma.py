"""Gemma."""

from typing import Any

from lightning_megatron_rl.models.families.family import Family, check_causal_and_tied


def check(config: Any) -> None:
    """Refuse what there is no place for."""
    check_causal_and_tied(config, "Gemma")


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
