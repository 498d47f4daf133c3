"""Weights to a vLLM model in the trainer's own process: copied on the GPU, out of the trainer's memory itself."""

from collections.abc import Iterator, Mapping

from lightning_megatron_rl.weights.placement import PlacedWeights, fill_buckets
from lightning_megatron_rl.weights.source import WeightSource
from lightning_megatron_rl.weights.transports.base import Ask, Part, Sent, Transport, total_bytes
from lightning_megatron_rl.weights.transports.borrowing import Borrowing


class InProcess(Transport):
    """The memory itself; once buckets have shown what goes where, that of other ranks as well (`Borrowing`).

    Args:
        bucket_bytes: Size of the buffer for tensors that come one by one.
        gpus: Numbers of the GPUs that this process reads, by `cuda_memory.identity`.
    """

    name = "in process"

    def __init__(self, bucket_bytes: int, gpus: Mapping[str, int] | None = None) -> None:
        self._bucket_bytes = bucket_bytes
        self._placed: dict[int, PlacedWeights] = {}
        self.borrowing = Borrowing(1, gpus or {}, in_process=True)

    @property
    def peer_bytes(self) -> int:  # type: ignore[override]
        """See `Transport`."""
        return self.borrowing.peer_bytes

    def send(self, source: WeightSource, ask: Ask, version: int) -> Sent:
        """See `Transport`; a collective where the source's iterators are."""
        if source.lender is not None and (sent := self.borrowing.send(source.lender, ask, version)) is not None:
            return sent
        self.borrowing.note(recorded=False)
        if source.whole is not None:
            placed = self._placed.setdefault(0, PlacedWeights())
            blocks, _ = placed.place(source.whole)
            part = Part(0, placed.placements, blocks=blocks, keep=True, stays=source.whole.stays)
            return Sent(placed.num_bytes, 0, ask(("replace", part, version)))
        ask(("begin",))
        num_bytes, extra = 0, 0
        for part in self._parts(source):
            num_bytes += total_bytes(part.placements or ())
            extra = max(extra, sum(block.numel() for block in part.blocks or ()))
            ask(("load", part))
        replayed = ask(("end", version))
        self.borrowing.note(recorded=source.buckets is not None)
        return Sent(num_bytes, extra, replayed)

    def forget(self, *, workers_are_gone: bool = False) -> None:
        """See `Transport`."""
        self.borrowing.forget(workers_are_gone=workers_are_gone)

    def _parts(self, source: WeightSource) -> Iterator[Part]:
        """Yield all weights, each part before the next is taken."""
        if source.buckets is None:
            for number, (bucket, placements) in enumerate(fill_buckets(source.tensors(), self._bucket_bytes)):
                yield Part(number, placements, blocks=[bucket])
            return
        for number, views in enumerate(source.buckets()):
            placed = self._placed.setdefault(number, PlacedWeights())
            blocks, _ = placed.place(views)
            if views.views:
                yield Part(number, placed.placements, blocks=blocks, stays=views.stays)
