"""GLM-4.7-Flash."""

from lightning_megatron_rl.models.families.family import Experts, Family

FAMILY = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    ("megatron.bridge.models.glm.glm47_flash_bridge",),
    name="GLM-4.7-Flash",
    attention="latent attention",
    mlp="first layer dense, then shared and routed experts; sigmoid router with a bias per expert",
    refused="",
    experts=Experts("n_routed_experts", "moe_intermediate_size"),
    tensor_parallel_sizes=(("intermediate_size",), ("moe_intermediate_size", "n_shared_experts")),
    no_place_for=("attention_bias",),
    can_be_tied=False,
)
