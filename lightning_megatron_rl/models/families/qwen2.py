"""Qwen2 and Qwen2.5."""

from lightning_megatron_rl.models.families.family import Family
from lightning_megatron_rl.models.families.rope import SCALED

FAMILY = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    ("megatron.bridge.models.qwen.qwen2_bridge",),
    name="Qwen2, Qwen2.5",
    attention="grouped queries with biases",
    mlp="dense",
    refused="use_sliding_window",
    rope=SCALED,
)
