"""Qwen3 with experts."""

from typing import Any

from lightning_megatron_rl.models.families.family import Experts, Family
from lightning_megatron_rl.models.families.rope import SCALED


def check(config: Any) -> None:
    """Refuse dense layers in between."""
    if config.decoder_sparse_step != 1 or config.mlp_only_layers:
        raise ValueError(
            f"Qwen3-MoE with decoder_sparse_step={config.decoder_sparse_step} and "
            f"mlp_only_layers={config.mlp_only_layers} is not supported: Megatron-Bridge gives experts to every layer"
        )


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    ("megatron.bridge.models.qwen.qwen3_moe_bridge",),
    name="Qwen3-MoE",
    attention="like Qwen3",
    mlp="experts in every layer, softmax router",
    refused="decoder_sparse_step, mlp_only_layers (dense layers in between), one expert per token with norm_topk_prob",
    rope=SCALED,
    experts=Experts(
        "num_experts", "moe_intermediate_size", softmax_over_chosen=lambda config: bool(config.norm_topk_prob)
    ),
    tensor_parallel_sizes=(),
    no_place_for=("attention_bias",),
    check=check,
)
