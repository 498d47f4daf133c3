"""Process groups, phases with a deadline, and the few collectives that modules and callbacks need."""

import logging
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_megatron_rl.parallel.messages import pack, unpack
from lightning_megatron_rl.utilities.spans import SpanLog

log = logging.getLogger(__name__)

T = TypeVar("T")
_TIMEOUT_MARKS = ("timed out", "timeout", "connection closed by peer", "connection reset by peer")


class ReplicaGroup:
    """The ranks that hold one replica of the model (tensor x pipeline x context), led by one of them.

    Python objects travel over gloo, also where tensors use NCCL.

    Args:
        timeout_s: Deadline of its collectives, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        from megatron.core import parallel_state

        rank, world = dist.get_rank(), dist.get_world_size()
        replicas: list[int] = [0] * world
        dist.all_gather_object(replicas, parallel_state.get_data_parallel_rank())
        self._group: dist.ProcessGroup | None = None
        timeout = timedelta(seconds=timeout_s)
        for replica in sorted(set(replicas)):
            ranks = [r for r in range(world) if replicas[r] == replica]
            group = dist.new_group(ranks, timeout=timeout, backend="gloo", group_desc="REPLICA_GROUP_GLOO")
            if rank in ranks:
                self._group, self.ranks = group, ranks
        self.leaders = [replicas.index(replica) for replica in sorted(set(replicas))]  # of all replicas
        self.is_leader = rank == self.ranks[0]
        self._of_leaders: dist.ProcessGroup | None = None
        if len(self.leaders) > 1:
            group = dist.new_group(self.leaders, timeout=timeout, backend="gloo", group_desc="LEADERS_GROUP_GLOO")
            self._of_leaders = group if self.is_leader else None

    def broadcast_object(self, value: T, source: int | None = None) -> T:
        """Return the object of global rank `source` (default: the leader) on every rank of the replica."""
        if len(self.ranks) == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self.ranks[0] if source is None else source, group=self._group)
        return box[0]

    def gather_object(self, value: T) -> list[T]:
        """Return the objects of all ranks of the replica, in their order, on every one of them."""
        values: list[Any] = [value] * len(self.ranks)
        if len(self.ranks) > 1:
            dist.all_gather_object(values, value, group=self._group)
        return values

    def wait_for_all(self) -> None:
        """Wait for every rank of the replica."""
        if len(self.ranks) > 1:
            dist.barrier(group=self._group)

    def arrive(self) -> Callable[[], bool]:
        """Say that this replica has come where all will, as its leader, and go on.

        Returns:
            Tells whether all replicas have come by now; it waits for nobody.
        """
        if self._of_leaders is None:
            return lambda: True
        work = dist.barrier(group=self._of_leaders, async_op=True)
        assert work is not None

        def have_all_come() -> bool:
            if not work.is_completed():
                return False
            work.wait()  # raises what has failed
            return True

        return have_all_come

    def run_on_leader(self, function: Callable[[], T], others: Callable[[], None] | None = None) -> T:
        """Call `function` on the leader and return its result on every rank of the replica.

        Args:
            function: What the leader does.
            others: What the other ranks do meanwhile: their part of the collectives that `function` calls.

        Raises:
            Exception: On every rank what the leader raised, so that no rank waits for one that is gone.
        """
        result: T | None = None
        error: Exception | None = None
        if self.is_leader:
            try:
                result = function()
            except Exception as caught:
                error = caught
        elif others is not None:
            others()
        portable = None if error is None else _portable(error)
        result, portable = self.broadcast_object((result, portable))
        if portable is not None:
            raise error or portable
        return result  # type: ignore[return-value]


def run_on_rank_zero[T](function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `function` on global rank 0; every rank gets its result, or raises what it raised.

    Args:
        function: What rank 0 does.
        group: All ranks, joined for the caller's thread; None is the default group.
    """
    outcome: list[Any] = [None, None]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as caught:
            error = caught
            outcome[1] = _portable(caught)
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise error or outcome[1]
    return outcome[0]


def run_on_all_ranks[T](function: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call `function` on every rank and return all results; if it failed on any, every rank raises the lowest's error.

    Args:
        function: What each rank does; its result is pickled.
        group: All ranks, joined for the caller's thread; None is the default group.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = function()
    except Exception as caught:
        error = caught
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (result, None if error is None else _portable(error)), group=group)
    first = next((found for _, found in outcomes if found is not None), None)
    if first is not None:
        raise error or first
    return [found for found, _ in outcomes]


def run_and_finish[T](
    function: Callable[[], T], finish: Callable[[list[T]], None], group: dist.ProcessGroup | None = None
) -> None:
    """Call `function` on every rank, then `finish` on rank 0 with all results; if either failed, every rank raises.

    Args:
        function: What each rank does; its result is pickled.
        finish: What rank 0 does with the results, if there are all of them.
        group: All ranks, joined for the caller's thread; None is the default group.
    """
    outcome: tuple[T | None, Exception | None] = (None, None)
    try:
        outcome = function(), None
    except Exception as caught:
        outcome = None, _portable(caught)
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(outcome, gathered, dst=0, group=group)

    def last() -> None:
        assert gathered is not None
        for _, error in gathered:
            if error is not None:
                raise error
        finish([result for result, _ in gathered])

    run_on_rank_zero(last, group)


def _portable(error: Exception) -> Exception:
    """Return an exception that can be sent to another process: known built-in types keep their type."""
    for kind in (ValueError, FileExistsError, FileNotFoundError, PermissionError, OSError, TypeError):
        if type(error) is kind:
            return kind(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


def data_parallel_all_reduce(tensor: Tensor, op: str = "sum", *, with_context_parallel: bool = False) -> Tensor:
    """Reduce `tensor` in place over the model replicas; `op` is "sum" or "max".

    What belongs to whole sequences is the same on all context-parallel ranks and counts once; what belongs to the
    tokens of one rank takes `with_context_parallel`.
    """
    reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
    group = _replicas(with_context_parallel=with_context_parallel)
    if group.size() > 1:
        dist.all_reduce(tensor, op=reduce_op, group=group)
    return tensor


def _replicas(*, with_context_parallel: bool = False) -> dist.ProcessGroup:
    """Return the group of the model's replicas; the one that Megatron uses where there are two of the same ranks.

    NCCL takes hundreds of MiB of each rank's GPU for a group that is used.
    """
    from megatron.core import parallel_state

    alike = parallel_state.get_context_parallel_world_size() == 1
    return parallel_state.get_data_parallel_group(with_context_parallel=with_context_parallel or alike)


def context_parallel_sum(tensor: Tensor) -> Tensor:
    """Sum `tensor` in place over the ranks that share sequences."""
    from megatron.core import parallel_state

    if parallel_state.get_context_parallel_world_size() > 1:
        dist.all_reduce(tensor, group=parallel_state.get_context_parallel_group())
    return tensor


def context_parallel_rank() -> int:
    """Which share of each sequence is this rank's."""
    from megatron.core import parallel_state

    return int(parallel_state.get_context_parallel_rank())


def data_parallel_rank() -> int:
    """Which replica this rank belongs to."""
    from megatron.core import parallel_state

    return int(parallel_state.get_data_parallel_rank())


def replica_share() -> tuple[int, int]:
    """Return the number of this rank's replica and the number of replicas; (0, 1) where there are no groups."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0, 1
    return data_parallel_rank(), int(parallel_state.get_data_parallel_world_size())


def data_parallel_gather[T](value: T) -> list[T]:
    """Return the values of all replicas, in their order."""
    from megatron.core import parallel_state

    replicas = parallel_state.get_data_parallel_world_size()
    if replicas == 1:
        return [value]
    values: list[Any] = [None] * replicas
    dist.all_gather_object(values, value, group=_replicas())
    return values


def data_parallel_exchange[T](outgoing: list[list[T]], device: torch.device | str = "cpu") -> list[list[T]]:
    """Send `outgoing[r]` to replica r and return what each replica sent here; objects for this replica are not copied.

    Args:
        outgoing: One list of picklable objects per replica.
        device: Where the backend of the data-parallel group works.
    """
    replicas = len(outgoing)
    if replicas == 1:
        return outgoing
    me, group = data_parallel_rank(), _replicas()
    messages = [b"" if replica == me else pack(objects) for replica, objects in enumerate(outgoing)]
    sizes = torch.tensor([len(message) for message in messages], device=device)
    sizes_in = torch.empty_like(sizes)
    dist.all_to_all_single(sizes_in, sizes, group=group)
    data = torch.frombuffer(bytearray(b"".join(messages) or b"-"), dtype=torch.uint8)[: int(sizes.sum())].to(device)
    incoming = torch.empty(int(sizes_in.sum()), dtype=torch.uint8, device=device)
    dist.all_to_all_single(incoming, data, sizes_in.tolist(), sizes.tolist(), group=group)
    parts = incoming.cpu().split(sizes_in.tolist())
    return [outgoing[me] if replica == me else unpack(part.numpy().tobytes()) for replica, part in enumerate(parts)]


def describe_rank() -> str:
    """Name this rank and its coordinates, e.g. ``rank 3 (tp 1, pp 0, cp 0, dp 1)``."""
    from megatron.core import parallel_state as ps

    if not ps.model_parallel_is_initialized():
        return f"rank {dist.get_rank() if dist.is_initialized() else 0}"
    return (
        f"rank {dist.get_rank()} (tp {ps.get_tensor_model_parallel_rank()}, pp"
        f" {ps.get_pipeline_model_parallel_rank()}, cp {ps.get_context_parallel_rank()}, dp"
        f" {ps.get_data_parallel_rank()})"
    )


@contextmanager
def phase_deadline(name: str, timeout_s: float, spans: SpanLog) -> Iterator[None]:
    """Name the phase in the error of a collective that ran into the process-group timeout or lost its peer.

    Args:
        name: Of the phase.
        timeout_s: Of the process groups, for the error.
        spans: Get one of the phase.

    Raises:
        RuntimeError: With the rank, the phase, the timeout and what to do, in place of the collective's own error. It
            is logged as well, at once: the launcher that sees a rank gone kills the others within seconds, which may
            be before they have torn down and printed their errors.
    """
    started = time.monotonic()
    try:
        with spans.during(name):
            yield
    except RuntimeError as error:
        text = str(error).lower()
        if not any(mark in text for mark in _TIMEOUT_MARKS) or isinstance(error, PhaseError):
            raise
        failure = PhaseError(
            f"{describe_rank()}: a collective failed after {time.monotonic() - started:.0f} s in phase '{name}'"
            f" (process-group timeout {timeout_s:.0f} s): another rank is slower, gone or in another phase; its own"
            " error is above or in its log. If the phase is only slow, raise MegatronStrategy(timeout_s=...)."
            f" Original error: {error}"
        )
        log.error(str(failure))
        raise failure from error


class PhaseError(RuntimeError):
    """A collective failed in a named phase."""


def peak_memory_gb(device: torch.device) -> float:
    """Return the most memory that this process has had: allocated on its GPU, or resident on a CPU run, in GB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts KiB


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a wall clock read afterwards counts its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
