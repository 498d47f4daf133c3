"""The sizes of a Hugging Face model that memory depends on, from its config and the shapes of its weights."""

import copy
import math
from collections.abc import Mapping
from typing import Any

from lightning_megatron_rl.compat.transformers_names import checkpoint_shapes, tied_names
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
    chosen = config.num_experts_per_tok if num_experts(config) else 0
    return ModelSize(
        dense=sum(counts.values()) - embeddings - experts,
        experts=experts,
        embeddings=embeddings,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        ffn_width=_ffn_width(config),
        vocabulary=config.vocab_size,
        routed_width=config.hidden_size * chosen,
        experts_met=experts * chosen // num_experts(config) if chosen else 0,
        **_attention_widths(config),
    )


def config_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's weights by Hugging Face name, from its Transformers config alone.

    The model is built on the meta device; a tied output embedding is left out.

    Raises:
        ValueError: Transformers cannot build it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    except Exception as error:
        raise ValueError(
            f"Transformers cannot build a {config.model_type} model of this config: {type(error).__name__}: {error}"
        ) from error
    tied = tied_names(model)
    return {name: shape for name, shape in checkpoint_shapes(model).items() if name not in tied}


def _attention_widths(config: Any) -> dict[str, int]:
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None) is not None:  # latent attention: keys and values of each head
        key = config.qk_nope_head_dim + config.qk_rope_head_dim
        return {
            "query_width": heads * key,
            "key_value_width": heads * (key + config.v_head_dim),
            "cache_width": config.kv_lora_rank + config.qk_rope_head_dim,
            "score_width": heads * (key + config.v_head_dim),
        }
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    return {"query_width": heads * width, "key_value_width": 2 * groups * width}


def _ffn_width(config: Any) -> int:
    """Width of the MLPs that one token meets; of a mixture those of its experts, shared ones included."""
    if not num_experts(config):
        return int(config.intermediate_size)
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return int(width * (config.num_experts_per_tok + (getattr(config, "n_shared_experts", None) or 0)))
