"""Mistral."""

from lightning_megatron_rl.models.families.family import Family

FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    ("megatron.bridge.models.mistral.mistral_bridge",),
    name="Mistral",
    attention="grouped queries, sliding window in every layer if the checkpoint has one",
    mlp="dense",
    refused="scaled rotary embedding",
)
