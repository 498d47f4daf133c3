"""Rotary embeddings with scaled positions, as Transformers, Megatron and vLLM compute them alike."""

from typing import Any

from lightning_megatron_rl.models.families.family import Rope

# What of rope_parameters all three read. Others, such as attention_factor, Transformers reads and vLLM does not.
YARN_KEYS = frozenset(
    {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"}
    | {"beta_fast", "beta_slow", "truncate"}
)
SCALED = Rope(("default", "linear", "yarn"), keys={"yarn": YARN_KEYS})


def scaled_positions(rope: dict[str, Any]) -> int | None:
    """Return how many positions YaRN is made for; None of other embeddings.

    Example:
        Qwen3 with a factor of 4 and 32,768 original positions: 131,072
    """
    if rope.get("rope_type") != "yarn":
        return None
    return int(rope["factor"] * rope["original_max_position_embeddings"])


def set_rope(provider: Any, rope: dict[str, Any]) -> None:
    """Set scaled positions that Megatron-Bridge does not take from config.json, or with another default.

    Args:
        provider: Megatron-Bridge's, of a model without latent attention.
        rope: `rope_parameters` of config.json.
    """
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        provider.seq_len_interpolation_factor = float(rope["factor"])
    if kind == "yarn":
        provider.position_embedding_type = "yarn"
        provider.yarn_rotary_scaling_factor = float(rope["factor"])
        provider.yarn_original_max_position_embeddings = rope["original_max_position_embeddings"]
        provider.yarn_beta_fast = float(rope.get("beta_fast") or 32)
        provider.yarn_beta_slow = float(rope.get("beta_slow") or 1)
        provider.yarn_correction_range_round_to_int = rope.get("truncate", True)
        provider.yarn_mscale = provider.yarn_mscale_all_dim = None  # attention is scaled by the factor alone
