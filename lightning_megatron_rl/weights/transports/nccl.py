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
from lightning_megatron_rl.weights.placement import fill_buckets
from lightning_megatron_rl.weights.source import WeightSource
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

    Args:
        num_workers: vLLM's workers.
        timeout_s: Deadline of each broadcast.
        bucket_bytes: Size of a bucket, which exists once here and once in each worker.
    """

    name = "NCCL"

    def __init__(self, num_workers: int, timeout_s: float, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = None
        self._pid: int | None = None  # whose workers are in the group

    def connect(self, pid: int, start: Callable[[dict[str, Any]], None], finish: Callable[[], None]) -> None:
        """See `Transport`: trainer and workers meet in a group of their own."""
        if pid == self._pid:
            return
        world_size = self._num_workers + 1
        timeout = timedelta(seconds=self._timeout_s)
        with socket.socket() as bound:  # from now on nobody else can take the port
            bound.bind((LOOPBACK, 0))
            port = bound.getsockname()[1]
            start({"port": port, "world_size": world_size, "timeout_s": self._timeout_s})
            self._group = join_group(port, rank=0, world_size=world_size, timeout=timeout, bound=bound)
        finish()
        self._pid = pid

    def send(self, source: WeightSource, ask: Ask, version: int) -> Sent:
        """See `Transport`."""
        ask(("begin",))
        sizes = self._send_tensors(source.tensors(), post_by(ask))
        return Sent(*sizes, ask(("end", version)))

    def _send_tensors(self, tensors: Iterable[tuple[str, Tensor]], post: Post) -> tuple[int, int]:
        assert self._group is not None, "connect comes first"
        group, num_bytes, extra = self._group, 0, 0
        for number, (bucket, placements) in enumerate(fill_buckets(tensors, self.bucket_bytes)):
            used = placements[-1].end

            def broadcast(payload: Tensor = bucket[:used]) -> None:
                group.broadcast([payload], dist.BroadcastOptions()).wait()
                torch.cuda.current_stream().synchronize()

            post(Part(number, placements, num_bytes=used), broadcast)
            num_bytes, extra = num_bytes + total_bytes(placements), max(extra, bucket.numel())
        return num_bytes, extra


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
