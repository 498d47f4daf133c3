"""Gemma."""

from lightning_megatron_rl.models.families.family import Family

FAMILY = Family(
    "gemma",
    "GemmaForCausalLM",
    ("megatron.bridge.models.gemma.gemma_bridge",),
    name="Gemma",
    attention="grouped queries",
    mlp="dense",
    refused="",
    activation=("hidden_act", "gelu_pytorch_tanh"),
    no_place_for=("attention_bias",),
)
