"""Gemma."""

from typing import Any

from lightning_megatron_rl.models.families.family import Family, check_causal_and_tied
from lightning_megatron_rl.models.families.sampler_keys import only_vllm


def check(config: Any) -> None:
    """Refuse what there is no place for, and another activation under the name by which vLLM reads it."""
    check_causal_and_tied(config, "Gemma")
    activation = getattr(config, "hidden_activation", None)
    if activation not in (None, "gelu_pytorch_tanh"):
        raise ValueError(only_vllm(f"hidden_activation={activation!r}", "gemma"))


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
