"""Megatron's data parallelism, freed after its last use."""

import weakref
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel


@cache
def ddp_class() -> "type[DistributedDataParallel]":
    """Return Megatron's `DistributedDataParallel` with hooks that do not keep it alive.

    Each parameter's gradient node has a hook that holds the wrapper. The wrapper's config holds the optimizer, and the
    fp32 shards of the distributed optimizer hold the gradient nodes: a cycle that leads through autograd, where the
    garbage collector sees nothing. Model, gradient buffers, optimizer state and process groups of every run would stay
    for as long as the process lives, and a second `fit` in a notebook would not find their memory.
    """
    from megatron.core.distributed import DistributedDataParallel

    class ReleasableDDP(DistributedDataParallel):
        """Hooks know their wrapper by a weak reference."""

        def _make_backward_post_hook(self, param: nn.Parameter) -> Callable[..., Any]:
            hook: Callable[..., Any] = DistributedDataParallel._make_backward_post_hook(weakref.proxy(self), param)
            return hook

    return ReleasableDDP
