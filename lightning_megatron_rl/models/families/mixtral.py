"""Mixtral."""

from lightning_megatron_rl.models.families.family import Experts, Family

FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    ("lightning_megatron_rl.models.families.mixtral_bridge",),  # Megatron-Bridge 0.6.2 has none
    name="Mixtral",
    attention="like Mistral",
    mlp="experts in every layer, softmax over the chosen ones",
    refused="scaled rotary embedding, one expert per token",
    experts=Experts("num_local_experts", "intermediate_size", softmax_over_chosen=lambda config: True),
    tensor_parallel_sizes=(),
)
