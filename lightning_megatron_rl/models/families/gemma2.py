"""Gemma 2."""

from math import sqrt
from typing import Any

from lightning_megatron_rl.models.families.family import Family, check_causal_and_tied, check_window_layers


def check(config: Any) -> None:
    """Refuse what contradicts the constants of Megatron-Bridge."""
    check_causal_and_tied(config, "Gemma 2")
    check_window_layers(config, every=2)


def torch_settings(provider: Any) -> dict[str, Any]:
    """Windows of layers and the scale of scores, which Bridge's own attention knows."""
    return {"window_attn_skip_freq": 2, "softmax_scale": 1 / sqrt(provider.query_pre_attn_scalar)}


FAMILY = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    ("megatron.bridge.models.gemma.gemma2_bridge",),
    name="Gemma 2",
    attention="grouped queries, soft-capped scores, every other layer with a window, norms behind layers",
    mlp="dense; soft-capped logits",
    refused="bidirectional attention, other patterns of layers",
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    no_place_for=("attention_bias",),
    check=check,
    norms="around",
    soft_caps=True,
    torch_settings=torch_settings,
    transformer_engine=False,
)
