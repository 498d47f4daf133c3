"""GLM-4.5 and GLM-4.6."""

from typing import Any

from lightning_megatron_rl.models.families.family import Experts, Family, Rope


def check(config: Any) -> None:
    """Refuse what the router of Megatron does otherwise."""
    if config.n_group != 1 or not config.norm_topk_prob or config.num_experts_per_tok == 1:
        raise ValueError(
            f"GLM-4.5 with n_group={config.n_group}, norm_topk_prob={config.norm_topk_prob}, num_experts_per_tok="
            f"{config.num_experts_per_tok} is not supported: one group, weights that add up to one, and more than one"
            " expert per token"
        )


FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    ("lightning_megatron_rl.models.families.glm4_moe_bridge",),
    name="GLM-4.5, GLM-4.6",
    attention="grouped queries, with or without biases, with or without norms of queries and keys; half of a head is"
    " rotated",
    mlp="first layers dense, then shared and routed experts; sigmoid router with a bias per expert",
    refused="n_group, norm_topk_prob=false, one expert per token; multi-token prediction is ignored",
    experts=Experts("n_routed_experts", "moe_intermediate_size"),
    tensor_parallel_sizes=(("intermediate_size",), ("moe_intermediate_size", "n_shared_experts")),
    rope=Rope(partial=True),
    check=check,
    dense_layers="first_k_dense_replace",
    can_be_tied=False,
    transformer_engine=False,
)
