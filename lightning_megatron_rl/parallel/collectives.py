"""Collectives over all ranks of a run, as Lightning's loops and loggers ask a strategy for them."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor
from torch import distributed as dist

from lightning_megatron_rl.parallel.distributed import ReplicaGroup, data_parallel_all_reduce

_OPERATIONS = {
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class CollectiveStrategy(ParallelStrategy):
    """A strategy whose ranks are joined by torch.distributed."""

    replica: ReplicaGroup | None = None

    def union(self, names: Sequence[str]) -> list[str]:
        """Return the sorted names of all ranks."""
        everywhere: list[Sequence[str]] = [()] * self.world_size
        dist.all_gather_object(everywhere, list(names))
        return sorted({name for rank in everywhere for name in rank})

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank."""
        if not dist.is_initialized():
            return
        if self.root_device.type == "cuda":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src` on every rank."""
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
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

    def data_parallel_all_reduce(
        self, tensor: Tensor, op: str = "sum", *, with_context_parallel: bool = False
    ) -> Tensor:
        """Reduce in place over the model replicas; see `distributed.data_parallel_all_reduce`."""
        return data_parallel_all_reduce(tensor, op, with_context_parallel=with_context_parallel)

    def broadcast_from_last_stage[T](self, obj: T) -> T:
        """Return the object of this replica's last pipeline stage on every rank of the replica."""
        assert self.replica is not None
        # Megatron orders ranks with the pipeline outermost: the last rank is of the last stage
        return self.replica.broadcast_object(obj, source=self.replica.ranks[-1])
