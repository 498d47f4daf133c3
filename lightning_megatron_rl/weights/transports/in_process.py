"""Weights to a vLLM model in the trainer's own process: copied on the GPU, out of the trainer's memory itself."""

from collections.abc import Iterable, Iterator

from lightning_megatron_rl.weights.placement import PlacedWeights, fill_buckets
from lightning_megatron_rl.weights.source import WeightSource, WeightViews
from lightning_megatron_rl.weights.transports.base import Part


class InProcess:
    """Parts of updates in the same process: the memory itself.

    Args:
        bucket_bytes: Size of the buffer for tensors that come one by one.
    """

    name = "in process"

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._placed: dict[int, PlacedWeights] = {}

    def parts(self, source: WeightSource) -> Iterator[Part]:
        """Yield all weights, each part before the next is taken; a collective where the source's iterators are."""
        if source.whole is not None:
            yield from self._in_place([source.whole], keep=True)
        elif source.buckets is not None:
            yield from self._in_place(source.buckets(), keep=False)
        else:
            for number, (bucket, placements) in enumerate(fill_buckets(source.tensors(), self._bucket_bytes)):
                yield Part(number, placements, blocks=[bucket])

    def _in_place(self, weights: Iterable[WeightViews], *, keep: bool) -> Iterator[Part]:
        for number, views in enumerate(weights):
            placed = self._placed.setdefault(number, PlacedWeights())
            if not views.views:
                continue
            blocks, _ = placed.place(views)
            yield Part(number, placed.placements, blocks=blocks, keep=keep, stays=views.stays)
