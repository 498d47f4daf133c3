"""A model's weights as a trainer hands them to an engine: where they lie, in buckets, or one by one."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Protocol, overload

import torch
from torch import Tensor

from lightning_megatron_rl.weights.lent import LentWeights, Readiness

if TYPE_CHECKING:
    from lightning_megatron_rl.weights.direct import Delivered, Order
    from lightning_megatron_rl.weights.messages import Holdings


@dataclass(frozen=True)
class WeightView:
    """One named tensor as it lies in memory.

    Example:
        The keys of a fused projection, whose rows lie in 8 blocks of 128:
        ``WeightView("k_proj.weight", view, shape=(1024, 2048))`` with a view of ``[8, 128, 2048]``.
    """

    name: str
    view: Tensor  # the tensor, or its rows in blocks that lie apart: [blocks, rows of a block, ...]
    shape: tuple[int, ...]  # of the tensor

    def tensor(self) -> Tensor:
        """The tensor; a copy if its rows lie apart."""
        return self.view.reshape(self.shape)


class WeightViews(Sequence[tuple[str, Tensor]]):
    """All weights of a model: a sequence of names and tensors, and the views that they are made from.

    A tensor whose rows lie apart is copied each time it is taken from the sequence; `views` copy nothing.

    Args:
        views: By name, each once.
        stays: Whether the memory stays where it is until whoever was given it has been told to let go. If not, it is
            to be read within the call that it is given to.
        memory: Number of that memory, where weights come in buckets that lie in several.
    """

    def __init__(self, views: Sequence[WeightView], *, stays: bool = False, memory: int = 0) -> None:
        self.views = list(views)
        self.stays = stays
        self.memory = memory

    @classmethod
    def of(cls, weights: Sequence[tuple[str, Tensor]]) -> "WeightViews":
        """Return weights as views of themselves; views are returned as they are."""
        if isinstance(weights, WeightViews):
            return weights
        return cls([WeightView(name, tensor, tuple(tensor.shape)) for name, tensor in weights])

    def __len__(self) -> int:
        return len(self.views)

    @overload
    def __getitem__(self, index: int) -> tuple[str, Tensor]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[str, Tensor]]: ...

    def __getitem__(self, index: int | slice) -> tuple[str, Tensor] | list[tuple[str, Tensor]]:
        if isinstance(index, slice):
            return [(found.name, found.tensor()) for found in self.views[index]]
        return self.views[index].name, self.views[index].tensor()


type CollectiveIterator[T] = Iterator[T]
"""An iterator whose steps may be collectives: other ranks that share the model take each step at the same time."""


class Lender(Protocol):
    """Ranks that lend their parameters' memory to samplers, so that nothing has to be put together.

    Both methods are collectives of the ranks that share the model; ranks without a sampler call them in
    `WeightSource.run_collectives`.
    """

    @property
    def gpus(self) -> frozenset[str]:
        """Whose memory the weights lie in (`cuda_memory.identity`); none if they cannot be lent."""

    def lend(self, readiness: Readiness, readers: int, *, in_process: bool = False) -> LentWeights | None:
        """Lend the weights if every rank is ready, before anything of them is taken; a collective.

        Args:
            readiness: This rank's sampler's.
            readers: Processes of its sampler.
            in_process: The only one of them is this process, which takes its own memory as it is.

        Returns:
            The same object until something has moved or a rank needs it anew; None: take buckets.
        """

    def settle(self, loaded: bool, *, apart: bool = False) -> bool:
        """Take back what was lent; returns whether every rank's sampler has read it: if not, take buckets.

        A collective; until it returns, no rank changes weights that others read.

        Args:
            loaded: Whether this rank's sampler has.
            apart: It has read no memory but that of its own process.
        """


class DirectSender(Protocol):
    """Ranks that send what they hold straight to the workers of servers, each of which gets what it loads."""

    @property
    def holdings(self) -> "Sequence[Holdings]":
        """What each rank of the replica has, the leader's first."""

    @property
    def keys(self) -> frozenset[str]:
        """Of the meetings with servers that can be sent to."""

    def send(self, order: "Order | None") -> "Delivered":
        """Send all weights to servers; a collective of the replica, before anything else of the source is taken.

        Each rank calls it once in an update: the leader with its order, the others, in
        `WeightSource.run_collectives`, with None. It fails on no rank because of a server.
        """


def _nothing() -> None:
    pass


@dataclass(frozen=True, eq=False)
class WeightSource:
    """All weights of a model, for one update of an engine; `source_of` makes one of named tensors.

    An engine takes them as suits it: `whole` where they lie, from `lender`, by `direct` messages to its workers, in
    `buckets`, or by `tensors`. Weights that are not whole on this rank are put together by all ranks that share the
    model: taking them is a collective. The rank with the engine calls `finish_collectives` after the update, however it
    ended, and a rank without an engine calls `run_collectives` meanwhile.

    Args:
        device: Where the tensors are.
        tensors: Yields names and tensors one by one, each of which stays as it is for as long as somebody holds it. A
            collective, which goes on where `buckets` has stopped; a rank that takes one of them does its part for a
            rank that takes the other.
        whole: All weights where they lie, as often as they are asked for; None: each comes once.
        lender: Lends the weights where they lie on several ranks; None: none are lent.
        direct: Sends them to servers from the ranks that hold them; None: nobody has asked for it, or it cannot be.
        buckets: Yields the weights in memory that is used again: what was yielded is overwritten by the next but one. A
            collective. The same objects in each update for as long as everything stays in place and nothing was lent in
            between. None: there are no buckets.
        run_collectives: Takes part in all collectives of an update on a rank without an engine, whatever the engines of
            other ranks take.
        finish_collectives: Takes part in the collectives that an engine has left out, so that no rank waits for them.
    """

    device: torch.device
    tensors: Callable[[], CollectiveIterator[tuple[str, Tensor]]]
    whole: WeightViews | None = None
    lender: Lender | None = None
    direct: DirectSender | None = None
    buckets: Callable[[], CollectiveIterator[WeightViews]] | None = None
    run_collectives: Callable[[], None] = _nothing
    finish_collectives: Callable[[], None] = _nothing

    @classmethod
    def of_views(cls, whole: WeightViews) -> "WeightSource":
        """Return a source of weights that are all here; nothing of it is a collective."""
        device = whole.views[0].view.device if whole.views else torch.device("cpu")
        return cls(device, whole.__iter__, whole=whole)

    @classmethod
    def streamed(cls, tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> "WeightSource":
        """Return a source of tensors that are made one by one, such as an export's, which is a collective."""
        stream = iter(tensors)

        def run_through() -> None:
            for _ in stream:
                pass

        return cls(device, lambda: stream, run_collectives=run_through, finish_collectives=run_through)


def source_of(weights: Iterable[tuple[str, Tensor]]) -> WeightSource:
    """Return names and tensors as a `WeightSource`: those of a sequence are all here, others come one by one."""
    if isinstance(weights, Sequence):
        return WeightSource.of_views(WeightViews.of(weights))
    stream = iter(weights)
    first = list(islice(stream, 1))
    device = first[0][1].device if first else torch.device("cpu")
    return WeightSource.streamed(chain(first, stream), device)
