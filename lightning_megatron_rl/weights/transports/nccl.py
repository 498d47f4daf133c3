"""Weights to vLLM's workers on other GPUs of the machine: NCCL broadcasts of buckets."""

import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron_rl.compat.torch_names import exchange_at_once, nccl_options
from lightning_megatron_rl.parallel.rendezvous import LOOPBACK, local_store
from lightning_megatron_rl.weights.placement import Placement, fill_buckets
from lightning_megatron_rl.weights.source import WeightSource, WeightViews
from lightning_megatron_rl.weights.transports.base import (
    DEFAULT_BUCKET_BYTES,
    Ask,
    Part,
    Post,
    Sent,
    Transport,
    post_by,
    total_bytes,
)

_NO_DEADLINE = timedelta(hours=6)  # who waits for a message of `NCCLGroup` has a deadline of its own
# Without this a thread of torch's watches a group. When NCCL fails it tells the default group, which ends the process
# eight minutes later, or holds up its end until then.
_UNWATCHED = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
_environment_lock = threading.Lock()


class NCCLTransport(Transport):
    """NCCL broadcasts to workers on other GPUs, tensor by tensor in buckets; nothing is lent.

    From the second update on the workers know what comes in which bucket, and one message announces all of them.

    Args:
        num_workers: vLLM's workers.
        timeout_s: Deadline of each broadcast.
        bucket_bytes: Size of two buckets, which exist once here and once in each worker; a tensor that is larger than
            half of it has a bucket of its own size.
    """

    name = "NCCL"

    def __init__(self, num_workers: int, timeout_s: float, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = None
        self._pid: int | None = None  # whose workers are in the group
        self._buckets: list[list[Placement]] = []  # as the workers know them

    def connect(self, pid: int, start: Callable[[dict[str, Any]], None], finish: Callable[[], None]) -> None:
        """See `Transport`: trainer and workers meet in a group of their own."""
        if pid == self._pid:
            return
        self._buckets = []
        world_size = self._num_workers + 1
        timeout = timedelta(seconds=self._timeout_s)
        with socket.socket() as bound:  # from now on nobody else can take the port
            bound.bind((LOOPBACK, 0))
            port = bound.getsockname()[1]
            start({"port": port, "world_size": world_size, "timeout_s": self._timeout_s})
            self._group = join_group(port, rank=0, world_size=world_size, timeout=timeout, bound=bound)
        finish()
        self._pid = pid

    def forget(self, *, workers_are_gone: bool = False) -> None:
        """See `Transport`: the next update tells again what comes in which bucket."""
        self._buckets = []

    def send(self, source: WeightSource, ask: Ask, version: int) -> Sent:
        """See `Transport`."""
        assert self._group is not None, "connect comes first"
        ask(("begin",))
        if self._buckets and not self._are_others(source.whole):
            self._send_known(self._group, source.tensors(), post_by(ask))
            buckets = self._buckets
        else:
            buckets = self._send_new(self._group, source.tensors(), post_by(ask))
        is_replayed = ask(("end", version))
        self._buckets = buckets
        sizes = [bucket[-1].end for bucket in buckets]
        extra = max(sizes[::2], default=0) + max(sizes[1::2], default=0)
        return Sent(sum(total_bytes(bucket) for bucket in buckets), extra, is_replayed)

    def _are_others(self, weights: WeightViews | None) -> bool:
        """Whether these are not the tensors of the last update; what comes one by one is only known when it comes."""
        if weights is None:
            return False
        found = [(view.name, view.view.dtype, view.shape) for view in weights.views]
        return found != [(place.name, place.dtype, place.shape) for bucket in self._buckets for place in bucket]

    def _send_new(
        self, group: dist.ProcessGroup, tensors: Iterable[tuple[str, Tensor]], post: Post
    ) -> list[list[Placement]]:
        """Send tensors in buckets, each with a message of its own; return what was in each."""
        buckets = []
        for number, (bucket, placements) in enumerate(fill_buckets(tensors, max(1, self.bucket_bytes // 2))):
            used = placements[-1].end

            def broadcast(payload: Tensor = bucket[:used]) -> None:
                group.broadcast([payload], dist.BroadcastOptions()).wait()
                torch.cuda.current_stream().synchronize()

            post(Part(number, placements, sizes=[used]), broadcast)
            buckets.append(placements)
        return buckets

    def _send_known(self, group: dist.ProcessGroup, tensors: Iterable[tuple[str, Tensor]], post: Post) -> None:
        """Send tensors in the buckets of the last update.

        Raises:
            RuntimeError: They are other ones. All buckets were sent, so that no worker waits.
        """
        sizes = [bucket[-1].end for bucket in self._buckets]
        other: list[str] = []

        def broadcast() -> None:
            device = torch.device("cuda", torch.cuda.current_device())
            other.extend(Broadcasts(group, sizes, device).send(self._buckets, tensors))
            torch.cuda.current_stream().synchronize()

        post(Part(0, None, sizes=sizes), broadcast)
        if other:
            self._buckets = []
            raise RuntimeError(
                f"weights are others than in the update before, the first {other[0]}: an engine is sent those of one"
                " model. Start another one for another model."
            )


class Broadcasts:
    """Buckets that go from one process to the others, in two buffers: while one travels the other is filled, or read.

    Args:
        group: The sender is rank 0.
        sizes: Bytes of each bucket.
        device: Of the buffers.
    """

    def __init__(self, group: dist.ProcessGroup, sizes: Sequence[int], device: torch.device) -> None:
        self._group, self._sizes = group, sizes
        largest = [max(sizes[first::2], default=0) for first in range(2)]
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in largest]
        self._under_way: dict[int, Any] = {}

    def send(self, buckets: Sequence[Sequence[Placement]], tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Send tensors, of which `buckets` says where they are expected; return the names of those that are not."""
        other: list[str] = []
        coming = iter(tensors)
        for number, bucket in enumerate(buckets):
            self._wait(number - 2)  # the last one from this buffer
            for place in bucket:
                name, tensor = next(coming, (place.name, None))
                if tensor is None or (name, tensor.dtype, tensor.shape) != (place.name, place.dtype, place.shape):
                    other.append(name)
                else:
                    place.view([self._buffer(number)]).copy_(tensor.detach())
            self._begin(number)
        for number in list(self._under_way):
            self._wait(number)
        return other + [name for name, _ in coming]

    def receive(self) -> Iterator[Tensor]:
        """Yield each bucket, ``[bytes]`` uint8, which is read, or on its way to be, when the next one is asked for."""
        for number in range(len(self._sizes) + 1):
            if number < len(self._sizes):
                self._begin(number)  # into the buffer of the last one but one, which is read
            if number:
                self._wait(number - 1)
                yield self._buffer(number - 1)

    def _buffer(self, number: int) -> Tensor:
        return self._buffers[number % 2][: self._sizes[number]]

    def _begin(self, number: int) -> None:
        self._under_way[number] = self._group.broadcast([self._buffer(number)], dist.BroadcastOptions())

    def _wait(self, number: int) -> None:
        """Wait, on a GPU the current stream alone, until a bucket has gone."""
        if (work := self._under_way.pop(number, None)) is not None:
            work.wait()


def join_group(
    port: int, *, rank: int, world_size: int, timeout: timedelta, bound: socket.socket | None = None
) -> dist.ProcessGroup:
    """Return an NCCL group outside the default group: trainer and workers belong to different worlds."""
    store = local_store(rank, world_size, port, timeout, bound)
    prefixed = dist.PrefixStore("weights", store)
    return dist.ProcessGroupNCCL(prefixed, rank, world_size, nccl_options(timeout))  # type: ignore[return-value]


class NCCLGroup:
    """A group for messages between processes of different worlds, whose failure is no end of any of them.

    It connects in the first `exchange`, in which every process must take part.

    Args:
        store: Of the group alone.
        number: Of this process in it.
        size: Number of processes.
        device: This process's.

    Raises:
        RuntimeError: There is no NCCL, or no GPU.
    """

    def __init__(self, store: dist.Store, number: int, size: int, device: torch.device) -> None:
        if device.type != "cuda":
            raise RuntimeError(f"its device is {device}")
        self._device = device
        with torch.cuda.device(device), _unwatched():
            self._group = dist.ProcessGroupNCCL(store, number, size, nccl_options(_NO_DEADLINE))

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> Callable[[], bool]:
        """See `DataGroup`."""
        with torch.cuda.device(self._device):
            work = exchange_at_once(self._group, sends, receives)

        def is_complete() -> bool:
            if not work.is_completed():
                return False
            with torch.cuda.device(self._device):
                work.wait(timedelta(seconds=1))  # it has ended: this raises if it has failed
            return True

        return is_complete

    def abort(self) -> None:
        """See `DataGroup`."""
        self._group.abort()


@contextmanager
def _unwatched() -> Iterator[None]:
    """A group that is made meanwhile leaves failures to whoever waits for its messages."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in _UNWATCHED}
        os.environ.update(_UNWATCHED)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
