"""OLMoE."""

from typing import Any

from lightning_megatron_rl.models.families.family import Experts, Family


def check(config: Any) -> None:
    """Refuse what Megatron has no place for, and an epsilon that vLLM does not read."""
    if config.clip_qkv is not None or config.norm_topk_prob:
        raise ValueError(
            f"OLMoE with clip_qkv={config.clip_qkv}, norm_topk_prob={config.norm_topk_prob} is not supported: Megatron"
            " does not clip, and the weights of a token's experts are those of all experts' softmax"
        )
    if config.rms_norm_eps != 1e-5:
        raise ValueError(
            f"OLMoE with rms_norm_eps={config.rms_norm_eps} is not supported: vLLM norms queries and keys with 1e-5"
        )


FAMILY = Family(
    "olmoe",
    "OlmoeForCausalLM",
    ("lightning_megatron_rl.models.families.olmoe_bridge",),
    name="OLMoE",
    attention="grouped queries, norms of all queries and of all keys",
    mlp="experts in every layer, softmax router",
    refused="clip_qkv, norm_topk_prob, rms_norm_eps other than 1e-5, tied embeddings",
    experts=Experts("num_experts", "intermediate_size"),
    tensor_parallel_sizes=(),
    check=check,
    can_be_tied=False,
    norm_all_heads=True,
    no_place_for=("attention_bias",),
    transformer_engine=False,
)
