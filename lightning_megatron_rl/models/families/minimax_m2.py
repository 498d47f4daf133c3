"""MiniMax-M2."""

from typing import Any

from lightning_megatron_rl.models.families.family import Experts, Family, Rope


def check(config: Any) -> None:
    """Refuse what Transformers and vLLM read differently: one rotates by a share of a head, the other by a number."""
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    rotated = getattr(config, "rotary_dim", None)
    if rotated != share * config.head_dim:
        raise ValueError(
            f"MiniMax-M2 with rotary_dim={rotated}, which vLLM reads, and partial_rotary_factor={share} of"
            f" head_dim={config.head_dim}, which Transformers reads: {share} x {config.head_dim} ="
            f" {share * config.head_dim:g} is not {rotated}. Put"
            " both into config.json, the latter into rope_parameters, as the model was trained"
        )


FAMILY = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    ("lightning_megatron_rl.models.families.minimax_m2_bridge",),
    name="MiniMax-M2",
    attention="grouped queries, norms of all queries and of all keys; half of a head is rotated",
    mlp="experts in every layer; sigmoid router with a bias per expert",
    refused="rotary_dim other than partial_rotary_factor x head_dim; sampling: vLLM 0.26 cannot on CPUs, and no"
    " GPU has been compared",
    experts=Experts("num_local_experts", "intermediate_size"),
    tensor_parallel_sizes=(),
    rope=Rope(partial=True),
    check=check,
    can_be_tied=False,
    norm_all_heads=True,
    transformer_engine=False,
    sampled=False,
)
