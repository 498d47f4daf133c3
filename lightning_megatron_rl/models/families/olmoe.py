"""OLMoE."""

from lightning_megatron_rl.models.families.family import Experts, Family

FAMILY = Family(
    "olmoe",
    "OlmoeForCausalLM",
    ("lightning_megatron_rl.models.families.olmoe_bridge",),
    name="OLMoE",
    attention="grouped queries, norms of all queries and of all keys",
    mlp="experts in every layer, softmax router",
    refused="",
    experts=Experts("num_experts", "intermediate_size"),
    tensor_parallel_sizes=(),
    norm_all_heads=True,
    no_place_for=("attention_bias",),
)
