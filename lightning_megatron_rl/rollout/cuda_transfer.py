"""Weights from the trainer's GPU to vLLM's workers: CUDA IPC on the same GPUs, NCCL to others; sent without vLLM."""

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron_rl.rollout.placement import PlacedWeights, Placement, fill_buckets, place
from lightning_megatron_rl.weight_views import WeightViews

BACKEND = "lightning_megatron_rl"  # the name under which vLLM knows our receiver
DEFAULT_BUCKET_BYTES = 512 * 2**20

# places in what torch rebuilds a tensor of another process from
_DEVICE = 6  # the device's number
_COUNTER = 11  # the file with the count of readers, and the place in it

Part = dict[str, Any]  # what the receiver takes; see `vllm_receiver.PartInfo`


class Transport(Protocol):
    """Hands weights over, part by part."""

    name: str

    def send(self, tensors: Iterable[tuple[str, Tensor]], post: "Post") -> tuple[int, int]:
        """Hand all tensors over; return their bytes, and the most bytes that were held besides them at one time."""

    def finish(self) -> None:
        """Called when the workers have finished the update."""


class Post(Protocol):
    """Gives the workers one part; returns when `meanwhile` has run and the workers have loaded it."""

    def __call__(self, part: Part, meanwhile: Callable[[], None] | None = None) -> None:
        """Send, run `meanwhile`, wait."""


class IPCTransport:
    """CUDA IPC: workers of the same machine map the trainer's memory.

    The tensors of a sequence are read where they are (`whole`), without a copy on the trainer's side; memory that stays
    is opened once, and stays open until `let_go`. Tensors of an iterator, and all for workers on several GPUs, go
    through one buffer of `bucket_bytes`, which is filled again when the workers have copied out of it; workers on other
    GPUs than the trainer's have one, too.

    Args:
        device: Number of the trainer's GPU among those that the workers see.
        num_workers: vLLM's workers, on as many GPUs.
        bucket_bytes: Size of that buffer.
    """

    name = "CUDA IPC"

    def __init__(self, device: int = 0, num_workers: int = 1, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.device = device
        self.num_workers = num_workers
        self.reads_in_place = num_workers == 1
        self.bucket_bytes = bucket_bytes
        self._last = PlacedWeights()
        self._open: list[tuple[Any, ...]] = []  # of memory that the worker keeps open: what it opened it with

    def forget(self, *, worker_is_gone: bool = False) -> None:
        """What comes next is new to the worker: another one, or one that has let go of what it had.

        Args:
            worker_is_gone: Whether it has ended, and so cannot tell torch that it does not read any more.
        """
        if worker_is_gone:
            for handle in self._open:
                torch.UntypedStorage._release_ipc_counter_cuda(*handle[_COUNTER : _COUNTER + 2])
        self._open = []
        self._last = PlacedWeights()

    @property
    def is_open(self) -> bool:
        """Whether the worker keeps memory open."""
        return bool(self._open)

    def whole(self, weights: WeightViews) -> tuple[Part, int]:
        """Return all weights as one part that is read in place, and their bytes; for one worker.

        Places and memory that are those of the last time are not sent again.
        """
        blocks, is_known = self._last.place(weights)
        torch.cuda.current_stream().synchronize()  # what computed the weights is done
        handles = None
        if not (is_known and self._open and weights.stays):
            handles = self._handles(blocks)
            self._open = handles[0] if weights.stays else []
        placements = None if is_known else self._last.placements
        return _part(placements, handles=handles, keep=True, stays=weights.stays), self._last.num_bytes

    def send(self, tensors: Iterable[tuple[str, Tensor]], post: Post) -> tuple[int, int]:
        """See `Transport`."""
        self.forget()  # the worker is about to learn other places
        num_bytes, extra, buffer = 0, 0, None
        for bucket, placements in fill_buckets(tensors, self.bucket_bytes):
            torch.cuda.current_stream().synchronize()
            handles = None if bucket is buffer else self._handles([bucket])
            buffer = bucket
            post(_part(placements, handles=handles, keep=False))
            num_bytes, extra = num_bytes + _num_bytes(placements), max(extra, bucket.numel())
        return num_bytes, extra

    def finish(self) -> None:
        """Take back what the workers have let go of."""
        torch.cuda.ipc_collect()

    def _handles(self, blocks: list[Tensor]) -> list[list[tuple[Any, ...]]]:
        """What each worker opens the blocks with: torch counts one reader for each handle, and takes it off again."""
        return [[_handle(block, self.device) for block in blocks] for _ in range(self.num_workers)]


class NCCLTransport:
    """NCCL broadcasts to workers on other GPUs, in buckets.

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

    def connect(self, start: Callable[[dict[str, Any]], None], finish: Callable[[], None]) -> None:
        """Meet the workers.

        Args:
            start: Tells the workers where, and returns at once.
            finish: Waits for their answer.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        world_size = self._num_workers + 1
        start({"host": "127.0.0.1", "port": port, "world_size": world_size, "timeout_s": self._timeout_s})
        self._group = join_group(
            "127.0.0.1", port, rank=0, world_size=world_size, timeout=timedelta(seconds=self._timeout_s)
        )
        finish()

    def send(self, tensors: Iterable[tuple[str, Tensor]], post: Post) -> tuple[int, int]:
        """See `Transport`."""
        assert self._group is not None, "connect comes first"
        group, num_bytes, extra = self._group, 0, 0
        for bucket, placements in fill_buckets(tensors, self.bucket_bytes):
            used = _end(placements)

            def broadcast(payload: Tensor = bucket[:used]) -> None:
                group.broadcast([payload], dist.BroadcastOptions()).wait()
                torch.cuda.current_stream().synchronize()

            post(_part(placements, num_bytes=used), broadcast)
            num_bytes, extra = num_bytes + _num_bytes(placements), max(extra, bucket.numel())
        return num_bytes, extra

    def finish(self) -> None:
        """Nothing was lent."""


def join_group(host: str, port: int, *, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return a group of NCCL that is none of the default group's: trainer and workers belong to different worlds."""
    store = dist.TCPStore(host, port, world_size, is_master=rank == 0, timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(dist.PrefixStore("weights", store), rank, world_size, options)  # type: ignore[return-value]


def whole_parts(weights: WeightViews) -> Iterator[Part]:
    """The one part of an update in the same process: the memory itself."""
    blocks, placements = place(weights.views)
    yield _part(placements, blocks=blocks, keep=True)


def bucket_parts(tensors: Iterable[tuple[str, Tensor]], capacity: int) -> Iterator[Part]:
    """Parts of an update in the same process, from tensors that come one by one."""
    for bucket, placements in fill_buckets(tensors, capacity):
        yield _part(placements, blocks=[bucket])


def _part(
    placements: list[Placement] | None,
    *,
    handles: list[list[tuple[Any, ...]]] | None = None,
    num_bytes: int | None = None,
    blocks: list[Tensor] | None = None,
    keep: bool = False,
    stays: bool = False,
) -> Part:
    return {
        "placements": placements,
        "handles": handles,
        "num_bytes": num_bytes,
        "blocks": blocks,
        "keep": keep,
        "stays": stays,
    }


def _handle(block: Tensor, device: int) -> tuple[Any, ...]:
    """What a process that knows the GPU as number `device` opens the block's memory with.

    Whenever torch shares a storage, it wraps it once more, with a count of its readers in a file of shared memory that
    stays for as long as the storage lives: parameters would collect one for each sync of the run. So what is shared is
    a storage of its own of the same memory, whose count goes when the reader has let go.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    storage = torch._C._construct_storage_from_data_pointer(block.data_ptr(), block.device, block.numel())
    lent = torch.empty(0, dtype=torch.uint8, device=block.device).set_(storage)  # type: ignore[call-overload]
    arguments = tuple(reduce_tensor(lent)[1])
    return (*arguments[:_DEVICE], device, *arguments[_DEVICE + 1 :])


def _num_bytes(placements: Iterable[Placement]) -> int:
    return sum(place.num_bytes for place in placements)


def _end(placements: Sequence[Placement]) -> int:
    return placements[-1].offset + placements[-1].num_bytes
