"""ERNIE 4.5 with experts."""

from lightning_megatron_rl.models.families.family import Experts, Family

FAMILY = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    ("megatron.bridge.models.ernie.ernie_45_bridge",),
    name="ERNIE 4.5 (MoE)",
    attention="grouped queries",
    mlp="first layers dense, then shared and routed experts",
    refused="",
    experts=Experts("moe_num_experts", "moe_intermediate_size"),
    tensor_parallel_sizes=(("intermediate_size",), ("moe_intermediate_size", "moe_num_shared_experts")),
    no_place_for=("use_bias",),
)
