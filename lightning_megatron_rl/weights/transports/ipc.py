"""Weights to vLLM's workers on the trainer's GPU, or on those beside it: CUDA IPC, the workers read in place."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice

import torch
from torch import Tensor

from lightning_megatron_rl.weights.cuda_memory import Handle, lend, take_back
from lightning_megatron_rl.weights.placement import PlacedWeights, fill_buckets
from lightning_megatron_rl.weights.source import CollectiveIterator, WeightSource, WeightViews
from lightning_megatron_rl.weights.transports.base import (
    DEFAULT_BUCKET_BYTES,
    PASSING,
    Ask,
    Part,
    Post,
    Sent,
    Transport,
    post_by,
    total_bytes,
)
from lightning_megatron_rl.weights.transports.borrowing import Borrowing


class IPCTransport(Transport):
    """CUDA IPC: workers of the same machine map the trainer's memory.

    Weights are read where they are: whole ones all at once, by one worker (`whole`), buckets one while the next is put
    together (`send_buckets`). Memory that stays is opened once, and stays open until the workers let go. Tensors that
    come one by one, and whole weights for workers on several GPUs, go through one buffer of `bucket_bytes`, which is
    filled again when the workers have copied out of it (`send_tensors`); workers on other GPUs than the trainer's have
    one, too.

    When buckets have shown what goes where in the workers' models, the next weights that lie in memory of several ranks
    are read there, by workers on the same GPUs, with nothing put together (`Borrowing`).

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
        self._sees_peers = bool(gpus)
        self.bucket_bytes = bucket_bytes
        self._placed: dict[int, PlacedWeights] = {}  # by number of the part
        self._open: dict[int, _Opened] = {}  # memory that the workers keep open, by number
        self._lent: list[Handle] = []  # that they may have open: also what this update has lent until it ends
        numbers = {gpu: number for number, gpu in enumerate(gpus)}
        self.borrowing = Borrowing(num_workers, numbers, before=self._open.clear)

    @property
    def peer_bytes(self) -> int:  # type: ignore[override]
        """See `Transport`."""
        return self.borrowing.peer_bytes

    @property
    def is_open(self) -> bool:
        """See `Transport`."""
        return bool(self._open or self.borrowing.handles)

    @property
    def copies_peers(self) -> bool:
        """See `Transport`."""
        return self.num_workers > 1 and not self._sees_peers

    def forget(self, *, workers_are_gone: bool = False) -> None:
        """See `Transport`."""
        if workers_are_gone:
            for handle in self._lent:
                take_back(handle)
        self.borrowing.forget(workers_are_gone=workers_are_gone)
        self._lent.clear()
        self._open.clear()
        self._placed.clear()

    def send(self, source: WeightSource, ask: Ask, version: int) -> Sent:
        """See `Transport`."""
        if source.whole is not None and self.num_workers == 1:
            part, num_bytes = self.whole(source.whole)
            return Sent(num_bytes, 0, ask(("replace", part, version)))
        if source.lender is not None and (sent := self.borrowing.send(source.lender, ask, version)) is not None:
            return sent
        if source.buckets is None:
            ask(("begin",))
            sizes = self.send_tensors(source.tensors(), post_by(ask))
        else:
            buckets, first = source.buckets(), list[WeightViews]()
            ask(("begin",), partial(_take_one, buckets, first))
            sizes = self.send_buckets(chain(first, buckets), post_by(ask))
        return Sent(*sizes, ask(("end", version)))

    def whole(self, weights: WeightViews) -> tuple[Part, int]:
        """Return all weights as one part that is read in place, and their bytes; for one worker."""
        self.borrowing.note(recorded=False)
        return self._part(weights, 0, keep=True), self._placed[0].num_bytes

    def send_tensors(self, tensors: Iterable[tuple[str, Tensor]], post: Post) -> tuple[int, int]:
        """Send tensors through the buffer; return their bytes, and the most that were held besides them at one time."""
        self._placed.clear()  # the workers are about to learn other places
        self.borrowing.note(recorded=False)
        num_bytes, extra, buffer = 0, 0, None
        for number, (bucket, placements) in enumerate(fill_buckets(tensors, self.bucket_bytes)):
            torch.cuda.current_stream().synchronize()
            handles = None if bucket is buffer else self._handles([bucket])
            buffer = bucket
            post(Part(number, placements, handles=handles))
            num_bytes, extra = num_bytes + total_bytes(placements), max(extra, bucket.numel())
        return num_bytes, extra

    def send_buckets(self, buckets: CollectiveIterator[WeightViews], post: Post) -> tuple[int, int]:
        """As `send_tensors`, from buckets of which the next is put together while workers read one."""
        num_bytes, extra, number = 0, 0, 0
        bucket = next(buckets, None)
        while bucket is not None:
            following: list[WeightViews] = []
            # once: this one is read until the next is there, and no longer
            advance = partial(_take_one, buckets, following)
            if bucket.views:
                post(self._part(bucket, number), advance)
                num_bytes += self._placed[number].num_bytes
            else:
                advance()
            extra = max(extra, _memory_of([bucket, *following]))
            bucket, number = following[0] if following else None, number + 1
        self.borrowing.note(recorded=True)
        return num_bytes, extra

    def finish(self) -> None:
        """See `Transport`."""
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
        return Part(number, placements, memory, handles, keep=keep, stays=weights.stays)

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


def _take_one(buckets: Iterator[WeightViews], taken: list[WeightViews]) -> None:
    taken.extend(islice(buckets, 1))


def _memory_of(buckets: Iterable[WeightViews]) -> int:
    """Bytes of the memory that buckets lie in, each in one piece."""
    storages = [bucket.views[0].view.untyped_storage() for bucket in buckets if bucket.views]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
