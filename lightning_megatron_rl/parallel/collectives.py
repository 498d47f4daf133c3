"""Collectives over all ranks of a run, as Lightning's loops and loggers ask a strategy for them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

_OPERATIONS = {
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


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
    """Reduce a tensor over all ranks; anything else is returned as it is.

    Args:
        tensor: The same shape on every rank.
        group: Of ranks; all of them by default.
        reduce_op: "mean", "sum", "max", "min", or one of torch's `ReduceOp`.

    Raises:
        ValueError: Another name.
    """
    if not isinstance(tensor, Tensor) or not dist.is_initialized():
        return tensor
    name = reduce_op.lower() if isinstance(reduce_op, str) else None
    if name is not None and name not in _OPERATIONS:
        raise ValueError(f"reduce_op={reduce_op!r} is none of {', '.join(_OPERATIONS)}.")
    tensor = tensor.clone()
    dist.all_reduce(tensor, op=reduce_op if name is None else _OPERATIONS[name], group=group)
    return tensor / dist.get_world_size(group) if name in ("mean", "avg") else tensor


def gather_parameters(chunks: Sequence[nn.Module]) -> None:
    """Wait for parameters that the last optimizer step has not gathered yet; a collective of all replicas.

    Under `overlap_param_gather` each replica has new values of its own shard only until the next forward pass.
    """
    from megatron.core.distributed import DistributedDataParallel

    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
