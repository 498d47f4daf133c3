"""A model's weights as a trainer hands them over: where they lie, or put together in buckets."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from lightning_megatron_rl.weights.lent import LentWeights, Readiness


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


class WeightBuckets(Iterator[tuple[str, Tensor]]):
    """All weights of a model that have to be put together first, bucket by bucket; a collective of the ranks.

    An iterator of names and tensors, each of which stays as it is for as long as somebody holds it. `buckets` are
    quicker: they lie in memory that is used again. Both go on where the other has stopped, and a rank that runs through
    the one does its part for a rank that runs through the other. A rank without a sampler runs through `follow`.

    Nothing has to be put together for samplers that read the weights where they lie: if all ranks `lend` them, they do,
    until all `settle` it.
    """

    @property
    @abstractmethod
    def gpus(self) -> frozenset[str]:
        """Whose memory the weights lie in (`cuda_memory.identity`); none if they cannot be lent."""

    @abstractmethod
    def lend(self, readiness: Readiness, readers: int) -> LentWeights | None:
        """Lend the weights if every rank is ready, before anything of them is taken; a collective.

        Args:
            readiness: This rank's sampler's.
            readers: Processes of its sampler.

        Returns:
            The same object for as long as nothing has moved and nobody has needed it anew; None: take buckets.
        """

    @abstractmethod
    def settle(self, loaded: bool) -> bool:
        """Take back what was lent; returns whether every rank's sampler has read it: if not, take buckets.

        A collective; until it returns, no rank changes its weights.
        """

    @abstractmethod
    def follow(self) -> Iterator[WeightViews]:
        """Do this rank's part, whatever the ranks with samplers do."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the tensors are."""

    @abstractmethod
    def buckets(self) -> Iterator[WeightViews]:
        """Yield the rest of the weights; what was yielded is overwritten by the next but one.

        The same objects in each update for as long as everything stays in place and nothing was lent in between.
        """
