"""Fused kernels: on by default with Transformer Engine's layers, where they compute the same in fewer passes."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from lightning_megatron_rl.models.layers.backend import LayerBackend

# Kernels that Transformer Engine brings along.
WITHOUT_TRANSFORMER_ENGINE = {
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "masked_softmax_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_shared_expert_overlap": False,
}
# How Transformer Engine and cuBLAS compute the products of experts, whose shapes change in every step.
EXPERTS_ENVIRONMENT = {
    "NVTE_USE_CUTLASS_GROUPED_GEMM": "1",  # one kernel for all experts of a rank, where it fits: on Hopper, in 16 bits
    # shapes for which cuBLASLt keeps the kernel it chose, 8192 without this; weight gradients are always its own
    "CUBLASLT_HEURISTICS_CACHE_CAPACITY": "1048576",
}


def fused_kernels(
    backend: LayerBackend, provider: Any, overrides: Mapping[str, Any], *, fused_rope: bool
) -> dict[str, bool]:
    """Return the fields of Megatron's `TransformerConfig` that turn fused kernels on where they compute the same.

    A gated SiLU in one kernel keeps its input alone for the backward pass, the separate operations two vectors of the
    MLP's width more per token and layer. The fused rotation has no factor for attention, which YaRN needs, and no
    latent attention.

    Args:
        backend: Of the layers; torch's have no fused kernels.
        provider: Megatron-Bridge's provider of the model.
        overrides: What the user sets, which goes first.
        fused_rope: Whether the kernel computes the family's rotation.

    Example:
        Qwen3 on Transformer Engine: ``{"apply_rope_fusion": True, "bias_activation_fusion": True}``
    """
    if backend == "torch":
        return dict(WITHOUT_TRANSFORMER_ENGINE)
    plain_rope = provider.position_embedding_type == "rope" and not provider.multi_latent_attention
    swiglu = provider.activation_func is torch.nn.functional.silu and provider.gated_linear_unit
    unchanged = provider.activation_func_clamp_value is None and provider.glu_linear_offset == 0.0
    fused = {
        "apply_rope_fusion": plain_rope and fused_rope,
        "bias_activation_fusion": swiglu and unchanged and not overrides.get("use_te_activation_func"),
    }
    return {name: True for name, fits in fused.items() if fits}


def tune_for_experts(backend: LayerBackend, num_experts: int | None) -> None:
    """Set environment variables that make the products of experts fast, unless the user has set them.

    An expert's tokens are others in each step, and for each new shape cuBLASLt chooses a kernel anew, which takes
    longer than to run it. Transformer Engine reads its variable with the products, cuBLASLt its own when the process
    first uses it: called before a model is built. Where there was a product before, the latter is without effect.

    Args:
        backend: Of the layers; torch's have no grouped products.
        num_experts: Of the model; None or 0 for a dense one.
    """
    if backend == "transformer_engine" and num_experts:
        for name, value in EXPERTS_ENVIRONMENT.items():
            os.environ.setdefault(name, value)


def fuses_gradients(backend: LayerBackend, asked: bool | None, *, has_adapters: bool) -> bool:
    """Return whether the layers' products add weight gradients to Megatron's buffers themselves.

    That spares the 16-bit gradient of each micro-batch, its rounding, and the pass that adds it. Adapters' gradients
    are small, and the weights below have none: with adapters it is off unless asked for.

    Args:
        backend: Of the layers; torch's products cannot.
        asked: The user's `gradient_accumulation_fusion`.
        has_adapters: Whether adapters alone are trained.
    """
    return backend == "transformer_engine" and (not has_adapters if asked is None else asked)
