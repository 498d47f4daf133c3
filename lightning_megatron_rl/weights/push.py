"""One push of a split model's weights: lent where they lie if all ranks agree, else put together in buckets."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lightning_megatron_rl.weights.lent import LentWeights, Readiness
from lightning_megatron_rl.weights.views import WeightBuckets, WeightViews

if TYPE_CHECKING:
    from lightning_megatron_rl.weights.lending import Lending
    from lightning_megatron_rl.weights.sharded_views import Room, ShardedViews


class Push(WeightBuckets):
    """See `WeightBuckets`.

    Args:
        views: The model's tensors.
        room: Memory for buckets.
        lending: Agreements between the ranks; None: nothing is lent in this push.
        places: Where this rank's parameters are.
    """

    def __init__(self, views: "ShardedViews", room: "Room", lending: "Lending | None", places: Sequence[int]) -> None:
        self._views = views
        self._room = room
        self._lending = lending
        self._places = list(places)
        self._way: Literal["open", "lent", "buckets"] = "open" if lending is not None else "buckets"
        self._next = 0
        self._held: list[tuple[str, Tensor]] = []

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._views.device

    @property
    def gpus(self) -> frozenset[str]:
        """Whose memory the weights lie in."""
        return frozenset() if self._lending is None else self._lending.gpus

    def lend(self, readiness: Readiness, readers: int) -> LentWeights | None:
        """See `WeightBuckets`."""
        if self._way != "open":
            return None
        assert self._lending is not None
        self._way = "buckets"  # whatever happens, there is one agreement
        agreed, lent = self._lending.agree(readiness, readers, self._places)
        if agreed:
            self._way = "lent"
        return lent

    def settle(self, loaded: bool) -> bool:
        """See `WeightBuckets`."""
        assert self._way == "lent"
        assert self._lending is not None
        self._way = "buckets"
        done = self._lending.settle(loaded)
        if done:
            self._next = len(self._views)
            self._views.free()
        return done

    def follow(self) -> Iterator[WeightViews]:
        """See `WeightBuckets`."""
        self.lend(Readiness.KNOWS_PLACES, readers=0)
        yield from self.buckets()

    def __next__(self) -> tuple[str, Tensor]:
        self._choose_buckets()
        while not self._held:
            if self._next == len(self._views):
                raise StopIteration
            assembly = self._views.assembly(self._next)
            self._next += 1
            self._held = list(assembly.run())[::-1]
        return self._held.pop()

    def buckets(self) -> Iterator[WeightViews]:
        """See `WeightBuckets`."""
        self._choose_buckets()
        assemblies = self._room.assemblies
        while self._next < len(self._views):
            number = self._next
            if number not in assemblies:
                assemblies[number] = self._views.assembly(number, self._room)
            self._next += 1
            yield assemblies[number].run()

    def _choose_buckets(self) -> None:
        """Take no more than buckets from here on; what is lent is read, or whoever would have read it is gone."""
        self.lend(Readiness.CANNOT, readers=0)
        if self._way == "lent":
            self.settle(loaded=True)
