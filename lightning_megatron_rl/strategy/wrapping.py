"""Megatron's wrappers for training: data parallelism, mixed precision, the optimizer, and the hooks between them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Optional

from torch import nn

from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig


def wrap_for_training(
    chunks: Sequence[nn.Module],
    ddp_config: Optional["DistributedDataParallelConfig"],
    *,
    mixed_precision: bool,
    use_distributed_optimizer: bool,
) -> nn.ModuleList:
    """Wrap each chunk in Megatron's DDP, below it in `Float16Module` for mixed precision; wrapped ones stay.

    Args:
        chunks: This rank's chunks, on their device.
        ddp_config: Megatron's own config; gradients are reduced in fp32 if not given.
        mixed_precision: Whether parameters are in a 16-bit format.
        use_distributed_optimizer: Overrides the config's field: it must agree with the optimizer's.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module
    from megatron.core.utils import get_model_config

    config = replace(
        ddp_config or DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        use_distributed_optimizer=use_distributed_optimizer,
    )
    wrapped = nn.ModuleList()
    for index, chunk in enumerate(chunks):
        if isinstance(chunk, DistributedDataParallel):
            wrapped.append(chunk)
            continue
        model_config = get_model_config(chunk)
        if mixed_precision and not isinstance(chunk, Float16Module):
            chunk = Float16Module(model_config, chunk)
        ddp = DistributedDataParallel(model_config, config, chunk, disable_bucketing=index > 0)
        ddp.broadcast_params()
        wrapped.append(ddp)
    return wrapped


def make_optimizer(config: "OptimizerConfig", chunks: Sequence[nn.Module]) -> MegatronOptimizer:
    """Make Megatron's optimizer for wrapped chunks and tell each chunk's config how gradients become final.

    Args:
        config: A resolved config, see `resolve_optimizer_config`.
        chunks: What `wrap_for_training` returned.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.utils import get_model_config

    optimizer = get_megatron_optimizer(config, list(chunks))
    for chunk in chunks:
        # every chunk's own config: the default, None, would leave gradients unreduced without a word
        chunk_config = get_model_config(chunk)
        chunk_config.finalize_model_grads_func = finalize_model_grads
        chunk_config.grad_scale_func = optimizer.scale_loss
    return MegatronOptimizer(optimizer)
