"""Collectives over all ranks of a run, as Lightning's loops and loggers ask a strategy for them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist


def union(names: Sequence[str]) -> list[str]:
    """Return the sorted names of all ranks."""
    everywhere: list[Sequence[str]] = [()] * dist.get_world_size()
    dist.all_gather_object(everywhere, list(names))
    return sorted({name for rank in everywhere for name in rank})


def barrier(device: torch.device) -> None:
    """Wait for every rank, if there are others yet."""
    if not dist.is_initialized():
        return
    if device.type == "cuda":
        dist.barrier(device_ids=[device.index])
    else:
        dist.barrier()


def broadcast[T](value: T, src: int = 0) -> T:
    """Return the value of rank `src` on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src)
    return box[0]


def reduce(tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
    """Reduce a tensor over all ranks ("mean" or "sum"); anything else is returned as it is."""
    if not isinstance(tensor, Tensor) or not dist.is_initialized():
        return tensor
    tensor = tensor.clone()
    is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
    op = dist.ReduceOp.SUM if is_mean or isinstance(reduce_op, str) else reduce_op
    dist.all_reduce(tensor, op=op, group=group)
    return tensor / dist.get_world_size(group) if is_mean else tensor


def gather_parameters(chunks: Sequence[nn.Module]) -> None:
    """Wait for parameters that the last optimizer step has not gathered yet; a collective of all replicas.

    Under `overlap_param_gather` each replica has new values of its own shard only until the next forward pass.
    """
    from megatron.core.distributed import DistributedDataParallel

    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
