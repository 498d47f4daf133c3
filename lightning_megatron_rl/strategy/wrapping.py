"""Megatron's wrappers for training: data parallelism, mixed precision, the optimizer, and the hooks between them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_megatron_rl.compat.ddp import ddp_class
from lightning_megatron_rl.compat.fused_gradients import fuse_weight_gradients
from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig


def wrap_for_training(
    chunks: Sequence[nn.Module], ddp_config: "DistributedDataParallelConfig", *, is_16bit: bool
) -> nn.ModuleList:
    """Wrap each chunk in Megatron's DDP, below it in `Float16Module` for 16-bit parameters; wrapped ones stay.

    Args:
        chunks: This rank's chunks, on their device.
        ddp_config: What `settings.resolve_ddp_config` returned.
        is_16bit: Whether parameters are in a 16-bit format.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.utils import get_model_config

    wrapped = nn.ModuleList()
    for index, chunk in enumerate(chunks):
        if isinstance(chunk, DistributedDataParallel):
            wrapped.append(chunk)
            continue
        model_config = get_model_config(chunk)
        if is_16bit and not isinstance(chunk, Float16Module):
            chunk = Float16Module(model_config, chunk)
        ddp = ddp_class()(model_config, ddp_config, chunk, disable_bucketing=index > 0)
        ddp.broadcast_params()
        if model_config.gradient_accumulation_fusion:
            fuse_weight_gradients(ddp)
        if ddp_config.overlap_param_gather:
            _gather_before_output(ddp)
        wrapped.append(ddp)
    return wrapped


def _gather_before_output(ddp: "DistributedDataParallel") -> None:
    """Gather the output layer's weight when the decoder is done.

    Megatron gathers a layer's parameters in a hook of its forward; log-probs read the output layer's weight without
    calling it.
    """
    from megatron.core.utils import unwrap_model

    model = unwrap_model(ddp)
    if not model.post_process:
        return

    def gather(*unused: Any) -> None:
        for parameter in model.output_layer.parameters():
            if parameter in ddp.param_to_bucket_group:
                ddp.param_to_bucket_group[parameter].finish_param_sync()

    model.decoder.register_forward_hook(gather)


def make_optimizer(config: "OptimizerConfig", chunks: Sequence[nn.Module]) -> MegatronOptimizer:
    """Make Megatron's optimizer for wrapped chunks and tell each chunk's config how gradients become final.

    Args:
        config: A resolved config, see `settings.resolve_optimizer_config`.
        chunks: What `wrap_for_training` returned.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.utils import get_model_config

    before = _main_parameters(chunks)
    optimizer = get_megatron_optimizer(config, list(chunks))
    _keep_main_parameters(before, chunks)
    for group in optimizer.param_groups:
        # Megatron's own scheduler would do this in every step: no weight decay of norms and biases, and another
        # learning rate of embeddings with `decoupled_lr`; Lightning's schedulers scale each group's own rate
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
        group["lr"] = group["max_lr"]
    # gradients are not to leave the rank before the last micro-batch, which matters when their reduction overlaps
    no_sync = [chunk.no_sync for chunk in chunks]
    for chunk in chunks:
        # every chunk's own config: the default, None, would leave gradients unreduced without a word
        chunk_config = get_model_config(chunk)
        chunk_config.finalize_model_grads_func = finalize_model_grads
        chunk_config.grad_scale_func = optimizer.scale_loss
        chunk_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return MegatronOptimizer(optimizer, chunks)


def _main_parameters(chunks: Sequence[nn.Module]) -> dict[nn.Parameter, Tensor]:
    """This rank's fp32 main parameters of 16-bit ones, where an optimizer has made them and they are not offloaded."""
    found = {parameter: getattr(parameter, "main_param", None) for chunk in chunks for parameter in chunk.parameters()}
    return {its: main for its, main in found.items() if main is not None and main.untyped_storage().size()}


@torch.no_grad()
def _keep_main_parameters(before: dict[nn.Parameter, Tensor], chunks: Sequence[nn.Module]) -> None:
    """Go on from the main parameters of an earlier fit, where the weights still are what they were rounded to."""
    for parameter, main in _main_parameters(chunks).items():
        old = before.get(parameter)
        if old is not None and torch.equal(old.to(parameter.dtype).to(main), main):
            main.copy_(old)
