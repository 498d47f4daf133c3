"""The sizes of a Hugging Face model that memory depends on, from its config and the shapes of its weights."""

import math
from collections.abc import Mapping
from typing import Any

from lightning_megatron_rl.models.families.registry import num_experts
from lightning_megatron_rl.planner.memory import ModelSize

_EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")


def model_size(config: Any, shapes: Mapping[str, tuple[int, ...]]) -> ModelSize:
    """Return the sizes of a model.

    Args:
        config: Its Transformers config.
        shapes: Shapes of the checkpoint's tensors by Hugging Face name; a tied output embedding left out.
    """
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    embeddings = sum(count for name, count in counts.items() if name.endswith(_EMBEDDINGS))
    experts = sum(count for name, count in counts.items() if ".experts." in name)
    heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    return ModelSize(
        dense=sum(counts.values()) - embeddings - experts,
        experts=experts,
        embeddings=embeddings,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        query_width=heads * head_width,
        key_value_width=2 * groups * head_width,
        ffn_width=_ffn_width(config),
        vocabulary=config.vocab_size,
        routed_width=config.hidden_size * config.num_experts_per_tok if num_experts(config) else 0,
    )


def _ffn_width(config: Any) -> int:
    """Width of the MLPs that one token meets."""
    if not num_experts(config):
        return int(config.intermediate_size)
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return int(width * config.num_experts_per_tok)
