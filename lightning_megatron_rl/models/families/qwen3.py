"""Qwen3, dense."""

from lightning_megatron_rl.models.families.family import Family
from lightning_megatron_rl.models.families.rope import SCALED

FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    ("megatron.bridge.models.qwen.qwen3_bridge",),
    name="Qwen3",
    attention="grouped queries, norms of queries and keys",
    mlp="dense",
    refused="use_sliding_window, attention_bias",
    rope=SCALED,
    no_place_for=("attention_bias",),
)
