"""Fused kernels: on by default with Transformer Engine's layers, where they compute the same in fewer passes."""

from collections.abc import Mapping
from typing import Any

import torch

from lightning_megatron_rl.models.backend import LayerBackend

# Kernels that Transformer Engine brings along.
WITHOUT_TRANSFORMER_ENGINE = {
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "masked_softmax_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_shared_expert_overlap": False,
}
OWN_ROTATION = "gemma3_text"  # two rotations by turns, which Megatron-Bridge hands on in a form of its own


def fused_kernels(
    backend: LayerBackend, provider: Any, model_type: str, overrides: Mapping[str, Any]
) -> dict[str, bool]:
    """Return the fields of Megatron's `TransformerConfig` that turn fused kernels on where they compute the same.

    A gated SiLU in one kernel keeps its input alone for the backward pass, the separate operations two vectors of the
    MLP's width more per token and layer. The fused rotation has no factor for attention, which YaRN needs, and no
    latent attention.

    Args:
        backend: Of the layers; torch's have no fused kernels.
        provider: Megatron-Bridge's provider of the model.
        model_type: Hugging Face's name of the family.
        overrides: What the user sets, which goes first.

    Example:
        Qwen3 on Transformer Engine: ``{"apply_rope_fusion": True, "bias_activation_fusion": True}``
    """
    if backend == "torch":
        return dict(WITHOUT_TRANSFORMER_ENGINE)
    plain_rope = provider.position_embedding_type == "rope" and not provider.multi_latent_attention
    swiglu = provider.activation_func is torch.nn.functional.silu and provider.gated_linear_unit
    unchanged = provider.activation_func_clamp_value is None and provider.glu_linear_offset == 0.0
    fused = {
        "apply_rope_fusion": plain_rope and model_type != OWN_ROTATION,
        "bias_activation_fusion": swiglu and unchanged and not overrides.get("use_te_activation_func"),
    }
    return {name: True for name, fits in fused.items() if fits}


def fuses_gradients(backend: LayerBackend, asked: bool | None, *, has_adapters: bool) -> bool:
    """Return whether the layers' products add weight gradients to Megatron's buffers themselves.

    That spares the 16-bit gradient of each micro-batch, its rounding, and the pass that adds it. Adapters' gradients
    are small, and the weights below have none: with adapters it is off unless asked for.

    Args:
        backend: Of the layers; torch's products cannot.
        asked: The user's `gradient_accumulation_fusion`.
        has_adapters: Whether adapters alone are trained.

    Example:
        ``fuses_gradients("transformer_engine", None, has_adapters=False) is True``
    """
    return backend == "transformer_engine" and (not has_adapters if asked is None else asked)
