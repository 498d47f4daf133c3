"""DeepSeek-V3 and -R1."""

from typing import Any

from lightning_megatron_rl.models.families.family import Experts, Family, Rope


def check(config: Any) -> None:
    """Refuse what the router and the rotation of Megatron do not have."""
    if not (config.norm_topk_prob and config.rope_interleave):
        raise ValueError(
            f"DeepSeek-V3 with norm_topk_prob={config.norm_topk_prob}, rope_interleave={config.rope_interleave} is not "
            "supported: both must be true"
        )


def relations(config: Any) -> dict[str, Any]:
    """Relations between the widths of latent attention, and which layers and experts there are."""
    widths = config.qk_nope_head_dim + config.qk_rope_head_dim
    dense, layers = config.first_k_dense_replace or 0, config.num_hidden_layers
    return {
        "qk_head_dim": "qk_nope_head_dim + qk_rope_head_dim" if config.qk_head_dim == widths else "another",
        "head_dim": "qk_rope_head_dim" if config.head_dim == config.qk_rope_head_dim else "another",
        "dense layers": "none" if dense == 0 else "all" if dense >= layers else "some",
        "compressed queries": config.q_lora_rank is not None,
        "shared experts": bool(config.n_shared_experts),
    }


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    ("megatron.bridge.models.deepseek.deepseek_v3_bridge",),
    name="DeepSeek-V3, -R1",
    attention="latent attention; default and yarn rotary embedding",
    mlp="first layers dense, then shared and routed experts; sigmoid router with a bias per expert, groups of experts",
    refused="attention_bias, norm_topk_prob=false, one expert per token, several groups of experts unless"
    " num_experts_per_tok // topk_group is 2, rms_norm_eps other than 1e-6, yarn with truncate, attention_factor or"
    " only one of mscale and mscale_all_dim; sampling where config.json lacks topk_method or scoring_func;"
    " multi-token prediction is ignored",
    experts=Experts("n_routed_experts", "moe_intermediate_size"),
    # its first layers are dense, and the shared experts are split like these
    tensor_parallel_sizes=(("intermediate_size",), ("moe_intermediate_size", "n_shared_experts")),
    rope=Rope(("default", "yarn")),
    no_place_for=("attention_bias",),
    check=check,
    relations=relations,
    dense_layers="first_k_dense_replace",
    can_be_tied=False,
    needed_to_sample={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
)
