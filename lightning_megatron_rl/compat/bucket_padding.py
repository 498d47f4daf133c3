"""Checkpoints of Megatron's distributed optimizer when its buffers have several buckets.

Megatron pads each bucket to a multiple of the number of replicas. For a checkpoint it joins the buckets *without* the
padding between them, and then cuts parameters out at offsets that count it: behind the first padded bucket every saved
moment and main parameter is shifted (megatron-core 0.19.2, `sharded_param_state_fully_reshardable`). Nothing shows but
an optimizer that resumes from other numbers.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer


def keep_bucket_padding(optimizer: "MegatronOptimizer") -> None:
    """Let `optimizer`, if it is a distributed one, join buckets with the padding between them; others stay.

    Example:
        Buckets of 3 and 2 numbers, padded to 4 each: ``[a, b, c, 0, d, e]`` is cut at 4, not ``[a, b, c, d, e]``.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if isinstance(optimizer, DistributedOptimizer) and not optimizer.is_stub_optimizer:
        gather = optimizer.get_parameter_state_dp_zero
        optimizer.get_parameter_state_dp_zero = functools.partial(  # type: ignore[method-assign]
            _with_padding, optimizer.buffers, gather
        )


def _with_padding(buffers: list[Any], gather: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `gather` returns for each buffer, with the numbers where the buffer has them."""
    state = gather(*args, **kwargs)
    for index, buffer in enumerate(buffers if state is not None else []):
        for tensors in state[index].values():
            for key, value in tensors.items():
                if isinstance(value, Tensor):
                    tensors[key] = spread(
                        value, [(bucket.offset, bucket.numel_unpadded) for bucket in buffer.buckets], buffer.numel
                    )
    return state


def spread(joined: Tensor, buckets: list[tuple[int, int]], size: int) -> Tensor:
    """Return a tensor of `size` with the parts of `joined` at their buckets' (offset, numbers), 0 elsewhere.

    Example:
        ``spread(torch.tensor([1, 2, 3]), [(0, 2), (3, 1)], 4)`` is ``[1, 2, 0, 3]``.
    """
    whole = torch.zeros(size, dtype=joined.dtype)
    for (offset, numbers), part in zip(buckets, joined.split([numbers for _, numbers in buckets]), strict=True):
        whole[offset : offset + numbers] = part
    return whole
