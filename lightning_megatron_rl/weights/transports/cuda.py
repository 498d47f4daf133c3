"""Weights from the trainer's GPU to vLLM's workers: CUDA IPC on the same GPUs, NCCL to others; sent without vLLM."""

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron_rl.compat.torch_names import nccl_options
from lightning_megatron_rl.parallel.rendezvous import LOOPBACK, local_store
from lightning_megatron_rl.weights.cuda_memory import Handle, lend, on_device, take_back
from lightning_megatron_rl.weights.lent import LentWeights, Readiness
from lightning_megatron_rl.weights.placement import PlacedWeights, Placement, fill_buckets
from lightning_megatron_rl.weights.views import WeightBuckets, WeightViews

BACKEND = "lightning_megatron_rl"  # the name under which vLLM knows our receiver
DEFAULT_BUCKET_BYTES = 512 * 2**20

PASSING = -1  # number of memory that is not kept open
LENT = -2  # of what several ranks lend

Part = dict[str, Any]  # what the receiver takes; see `vllm_receiver.PartInfo`


class Transport(Protocol):
    """Hands weights over, part by part."""

    name: str

    def send(self, weights: Iterable[tuple[str, Tensor]], post: "Post") -> tuple[int, int]:
        """Hand all weights over; return their bytes, and the most bytes that were held besides them at one time."""

    def finish(self) -> None:
        """Called when the workers have finished the update."""


class Post(Protocol):
    """Gives the workers one part; returns when `meanwhile` has run and the workers have loaded it."""

    def __call__(self, part: Part, meanwhile: Callable[[], None] | None = None) -> None:
        """Send, run `meanwhile`, wait."""


class Ask(Protocol):
    """Sends the engine's process a message and returns its answer."""

    def __call__(self, message: tuple[Any, ...], meanwhile: Callable[[], None] | None = None) -> Any:
        """Send, run `meanwhile`, wait."""


class IPCTransport:
    """CUDA IPC: workers of the same machine map the trainer's memory.

    Weights are read where they are: those of a sequence all at once, by one worker (`whole`), those of `WeightBuckets`
    bucket by bucket, one while the next is put together. Memory that stays is opened once, and stays open until the
    workers let go. Tensors of an iterator, and of a sequence for workers on several GPUs, go through one buffer of
    `bucket_bytes`, which is filled again when the workers have copied out of it; workers on other GPUs than the
    trainer's have one, too.

    When buckets have shown what goes where in the workers' models, the next weights that lie in memory of several ranks
    are read there, by workers on the same GPUs, with nothing put together (`send_lent`).

    Args:
        device: Number of the trainer's GPU among those that the workers see.
        num_workers: vLLM's workers, on as many GPUs.
        bucket_bytes: Size of that buffer.
        gpus: What the workers see, in their order (`cuda_memory.identity`); none if a GPU cannot read another's memory.
    """

    name = "CUDA IPC"

    def __init__(
        self,
        device: int = 0,
        num_workers: int = 1,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        gpus: Sequence[str] = (),
    ) -> None:
        self.device = device
        self.num_workers = num_workers
        self._gpus = list(gpus)
        self._may_borrow = True
        self._has_recorded = False  # whether the workers know what becomes of all weights that came in buckets
        self._borrowed: LentWeights | None = None  # what they read in place
        self.peer_bytes = 0  # of that on other GPUs, by the worker that reads most
        self.reads_in_place = num_workers == 1
        self.bucket_bytes = bucket_bytes
        self._placed: dict[int, PlacedWeights] = {}  # by number of the part
        self._open: dict[int, _Opened] = {}  # memory that the workers keep open, by number
        self._lent: list[Handle] = []  # that they may have open: also what this update has lent until it ends

    @property
    def is_open(self) -> bool:
        """Whether workers keep memory open."""
        return bool(self._open)

    @property
    def copies_peers(self) -> bool:
        """Whether workers keep copies of what is on other GPUs."""
        return self.num_workers > 1 and not self._gpus

    def forget(self, *, workers_are_gone: bool = False) -> None:
        """What comes next is new to the workers: other ones, or some that have let go of what they had.

        Args:
            workers_are_gone: Whether they have ended, and so cannot tell torch that they do not read any more.
        """
        if workers_are_gone:
            for handle in self._lent:
                take_back(handle)
            self._has_recorded = False
        self._lent.clear()
        self._open.clear()
        self._placed.clear()
        self._borrowed = None

    def whole(self, weights: WeightViews) -> tuple[Part, int]:
        """Return all weights as one part that is read in place, and their bytes; for one worker."""
        self._has_recorded, self._borrowed, self.peer_bytes = False, None, 0
        return self._part(weights, 0, keep=True), self._placed[0].num_bytes

    def send(self, weights: Iterable[tuple[str, Tensor]], post: Post) -> tuple[int, int]:
        """See `Transport`."""
        self._placed.clear()  # the workers are about to learn other places
        self._has_recorded, self._borrowed, self.peer_bytes = False, None, 0
        num_bytes, extra, buffer = 0, 0, None
        for number, (bucket, placements) in enumerate(fill_buckets(weights, self.bucket_bytes)):
            torch.cuda.current_stream().synchronize()
            handles = None if bucket is buffer else self._handles([bucket])
            buffer = bucket
            post(make_part(number, placements, handles=handles))
            num_bytes, extra = num_bytes + _num_bytes(placements), max(extra, bucket.numel())
        return num_bytes, extra

    def send_buckets(self, buckets: Iterator[WeightViews], post: Post) -> tuple[int, int]:
        """As `send`, from buckets of which the next may be put together while workers read one."""
        num_bytes, extra, number = 0, 0, 0
        bucket = next(buckets, None)
        while bucket is not None:
            following: list[WeightViews] = []
            # once: whoever reads this one, reads it until the next is there, and no longer
            advance = partial(_take_one, buckets, following)
            if bucket.views:
                post(self._part(bucket, number), advance)
                num_bytes += self._placed[number].num_bytes
            else:
                advance()
            extra = max(extra, _memory_of([bucket, *following]))
            bucket, number = following[0] if following else None, number + 1
        self._has_recorded, self._borrowed, self.peer_bytes = True, None, 0
        return num_bytes, extra

    def send_lent(self, weights: WeightBuckets, ask: "Ask", version: int) -> tuple[int, int, bool] | None:
        """Let the workers read weights where they lie, if every rank's sampler can; None: send buckets."""
        readiness = Readiness.CANNOT
        if self._may_borrow and self._has_recorded and weights.gpus and weights.gpus <= set(self._gpus):
            readiness = Readiness.NEEDS_PLACES if self._borrowed is None else Readiness.KNOWS_PLACES
        lent = weights.lend(readiness, self.num_workers)
        if lent is None:
            return None
        if lent is not self._borrowed:
            self._borrow(lent, ask)
        replayed = False
        if self._borrowed is not None:
            replayed = ask(("replace", make_part(0, None, keep=True, stays=True, borrowed=True), version))
        if not weights.settle(self._borrowed is not None):
            return None
        return lent.num_bytes, 0, replayed

    def _borrow(self, lent: LentWeights, ask: "Ask") -> None:
        """Tell the workers where weights lie; they close everything else."""
        numbers = [self._gpus.index(memory.gpu) for memory in lent.memories]
        handles = [
            [on_device(memory.handles[worker], number) for memory, number in zip(lent.memories, numbers, strict=True)]
            for worker in range(self.num_workers)
        ]
        opened = _Opened([], list(chain(*handles)))
        self._lent.extend(opened.handles)
        self._open = {LENT: opened}
        self._borrowed = None
        peer_bytes = ask(("borrow", lent.weights, handles))
        if None not in peer_bytes:
            self._borrowed, self.peer_bytes = lent, max(peer_bytes)
            return
        self._may_borrow = False  # nor the next time
        ask(("let_go",))  # those that could
        del self._open[LENT]
        self._lent = self._lent[: -len(opened.handles)]
        for handle in opened.handles:  # those that could not have opened nothing that they could close
            take_back(handle)

    def finish(self) -> None:
        """Take back what the workers have let go of."""
        self._lent = [handle for opened in self._open.values() for handle in opened.handles]
        torch.cuda.ipc_collect()

    def _part(self, weights: WeightViews, number: int, *, keep: bool = False) -> Part:
        """Return weights as a part that is read in place.

        Places and open memory that are those of the last time are not sent again.
        """
        placed = self._placed.setdefault(number, PlacedWeights())
        blocks, is_known = placed.place(weights)
        torch.cuda.current_stream().synchronize()  # what computed the weights is done
        memory = weights.memory if weights.stays else PASSING
        opened = self._open.get(memory)
        handles = None
        if opened is None or opened.places != placed.spans:
            handles = self._handles(blocks)
            if weights.stays:
                self._open[memory] = _Opened(placed.spans, list(chain(*handles)))
        placements = None if is_known else placed.placements
        return make_part(number, placements, handles=handles, memory=memory, keep=keep, stays=weights.stays)

    def _handles(self, blocks: list[Tensor]) -> list[list[Handle]]:
        """What each worker opens the blocks with: torch counts one reader for each handle, and takes it off again."""
        handles = [[lend(block, self.device) for block in blocks] for _ in range(self.num_workers)]
        self._lent.extend(chain(*handles))
        return handles


@dataclass(frozen=True)
class _Opened:
    """Memory that the workers keep open."""

    places: list[tuple[int, int]]  # of its blocks: where they start, and their bytes
    handles: list[Handle]  # what they opened it with


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
            probe.bind((LOOPBACK, 0))
            port = probe.getsockname()[1]
        world_size = self._num_workers + 1
        start({"port": port, "world_size": world_size, "timeout_s": self._timeout_s})
        self._group = join_group(port, rank=0, world_size=world_size, timeout=timedelta(seconds=self._timeout_s))
        finish()

    def send(self, weights: Iterable[tuple[str, Tensor]], post: Post) -> tuple[int, int]:
        """See `Transport`."""
        assert self._group is not None, "connect comes first"
        group, num_bytes, extra = self._group, 0, 0
        for number, (bucket, placements) in enumerate(fill_buckets(weights, self.bucket_bytes)):
            used = _end(placements)

            def broadcast(payload: Tensor = bucket[:used]) -> None:
                group.broadcast([payload], dist.BroadcastOptions()).wait()
                torch.cuda.current_stream().synchronize()

            post(make_part(number, placements, num_bytes=used), broadcast)
            num_bytes, extra = num_bytes + _num_bytes(placements), max(extra, bucket.numel())
        return num_bytes, extra

    def finish(self) -> None:
        """Nothing was lent."""


def join_group(port: int, *, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return a group of NCCL that is none of the default group's: trainer and workers belong to different worlds."""
    store = local_store(rank, world_size, port, timeout)
    prefixed = dist.PrefixStore("weights", store)
    return dist.ProcessGroupNCCL(prefixed, rank, world_size, nccl_options(timeout))  # type: ignore[return-value]


class InProcess:
    """Parts of updates in the same process: the memory itself."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._placed: dict[int, PlacedWeights] = {}

    def parts(self, weights: Iterable[WeightViews], *, keep: bool = False) -> Iterator[Part]:
        """Yield weights where they are, each before the next is taken.

        Args:
            weights: All of them, or buckets.
            keep: Whether they are all there until the update ends.
        """
        for number, views in enumerate(weights):
            placed = self._placed.setdefault(number, PlacedWeights())
            if not views.views:
                continue
            blocks, _ = placed.place(views)
            yield make_part(number, placed.placements, blocks=blocks, keep=keep, stays=views.stays)

    def bucket_parts(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Part]:
        """Yield tensors that come one by one, in buckets."""
        for number, (bucket, placements) in enumerate(fill_buckets(tensors, self._bucket_bytes)):
            yield make_part(number, placements, blocks=[bucket])


def make_part(
    number: int,
    placements: list[Placement] | None,
    *,
    handles: list[list[Handle]] | None = None,
    num_bytes: int | None = None,
    blocks: list[Tensor] | None = None,
    memory: int = PASSING,
    keep: bool = False,
    stays: bool = False,
    borrowed: bool = False,
) -> Part:
    """Return what `vllm_receiver.PartInfo` describes."""
    return {
        "number": number,
        "placements": placements,
        "memory": memory,
        "handles": handles,
        "num_bytes": num_bytes,
        "blocks": blocks,
        "keep": keep,
        "stays": stays,
        "borrowed": borrowed,
    }


def _take_one(buckets: Iterator[WeightViews], taken: list[WeightViews]) -> None:
    taken.extend(islice(buckets, 1))


def _memory_of(buckets: Iterable[WeightViews]) -> int:
    """Bytes of the memory that buckets lie in, each in one piece."""
    storages = [bucket.views[0].view.untyped_storage() for bucket in buckets if bucket.views]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _num_bytes(placements: Iterable[Placement]) -> int:
    return sum(place.num_bytes for place in placements)


def _end(placements: Sequence[Placement]) -> int:
    return placements[-1].offset + placements[-1].num_bytes
