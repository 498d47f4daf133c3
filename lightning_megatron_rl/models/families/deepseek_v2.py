"""DeepSeek-V2."""

from lightning_megatron_rl.models.families.family import Experts, Family, Rope

FAMILY = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    ("megatron.bridge.models.deepseek.deepseek_v2_bridge",),
    name="DeepSeek-V2",
    attention="latent attention",
    mlp="first layers dense, then shared and routed experts; softmax router",
    refused="",
    experts=Experts("n_routed_experts", "moe_intermediate_size"),
    tensor_parallel_sizes=(("intermediate_size",), ("moe_intermediate_size", "n_shared_experts")),
    rope=Rope(("default", "yarn")),
    no_place_for=("attention_bias", "mlp_bias"),
    dense_layers="first_k_dense_replace",
    can_be_tied=False,
)
