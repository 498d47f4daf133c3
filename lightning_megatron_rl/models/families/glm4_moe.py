"""GLM-4.5 and GLM-4.6."""

from lightning_megatron_rl.models.families.family import Experts, Family

FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    ("lightning_megatron_rl.models.families.glm4_moe_bridge",),
    name="GLM-4.5, GLM-4.6",
    attention="grouped queries, with or without biases, with or without norms of queries and keys; half of a head is"
    " rotated",
    mlp="first layers dense, then shared and routed experts; sigmoid router with a bias per expert",
    refused="",
    experts=Experts("n_routed_experts", "moe_intermediate_size"),
    tensor_parallel_sizes=(("intermediate_size",), ("moe_intermediate_size", "n_shared_experts")),
    dense_layers="first_k_dense_replace",
    can_be_tied=False,
)
