"""HunYuan V3."""

from lightning_megatron_rl.models.families.family import Experts, Family

FAMILY = Family(
    "hy_v3",
    "HYV3ForCausalLM",
    ("lightning_megatron_rl.models.families.hy_v3_bridge",),
    name="HunYuan V3",
    attention="grouped queries, norms of queries and keys",
    mlp="first layer dense, then shared and routed experts; sigmoid router with a bias per expert",
    refused="attention_bias, mlp_bias, tied embeddings; sampling: vLLM 0.26 cannot on CPUs, no GPU was compared",
    experts=Experts("num_experts", "moe_intermediate_size"),
    tensor_parallel_sizes=(("intermediate_size",), ("moe_intermediate_size", "num_shared_experts")),
    can_be_tied=False,
    no_place_for=("attention_bias", "mlp_bias"),
    transformer_engine=False,
    sampled=False,
)
