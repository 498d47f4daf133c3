"""EXAONE 4."""

from typing import Any

from lightning_megatron_rl.models.families.family import Family, Rope
from lightning_megatron_rl.models.families.llama import LLAMA3_ROPE


def check(config: Any) -> None:
    """Refuse windows: layers without one have no rotary embedding then."""
    if not config.tie_word_embeddings:
        raise ValueError(
            "EXAONE 4 with tie_word_embeddings=false is not supported: there is no place for the output layer"
        )
    if set(config.layer_types) != {"full_attention"} or config.sliding_window:
        raise ValueError(
            f"EXAONE 4 with sliding_window={config.sliding_window}, layer_types={config.layer_types} is not supported:"
            " no layer may have a window"
        )


FAMILY = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    ("megatron.bridge.models.exaone.exaone4.exaone4_bridge",),
    name="EXAONE 4",
    attention="grouped queries, norms of queries and keys, norms behind layers only",
    mlp="dense",
    refused="layers with a window, untied embeddings",
    rope=Rope(("default", "llama3"), constants={"llama3": LLAMA3_ROPE}),
    check=check,
    norms="behind",
    transformer_engine=False,
)
