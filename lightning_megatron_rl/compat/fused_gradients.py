"""Transformer Engine's own accumulation of weight gradients, under Megatron's data parallelism.

Megatron has one setting, `gradient_accumulation_fusion`, for Transformer Engine's layers and its own, and its own
refuse to be built without an extension of Apex (megatron-core 0.19.2). Of its own there is only the output layer here,
whose weight log-probs read without calling it. So layers are built without, and Transformer Engine's told afterwards.
"""

import torch
from torch import nn


def fuse_weight_gradients(ddp: nn.Module) -> None:
    """Let Transformer Engine's layers add weight gradients to fp32 `main_grad` in the product that computes them.

    A layer takes part if all its weights are trained and their gradients are kept in fp32: the layer looks at the first
    of several (experts) alone, and reads `main_grad` of each. Its attribute `fuse_wgrad_accumulation` is read in each
    forward pass; other layers have none. Norms, biases, embeddings and the output layer are added by DDP as before.

    Args:
        ddp: A chunk in Megatron's DDP, which has made the buffers.
    """
    for module in ddp.modules():
        if not hasattr(module, "fuse_wgrad_accumulation"):
            continue
        named = module.named_parameters(recurse=False)
        gradients = [getattr(weight, "main_grad", None) for name, weight in named if name.startswith("weight")]
        in_fp32 = [gradient is not None and gradient.dtype == torch.float32 for gradient in gradients]
        module.fuse_wgrad_accumulation = bool(in_fp32) and all(in_fp32)  # type: ignore[assignment]
