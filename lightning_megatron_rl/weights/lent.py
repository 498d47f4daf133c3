"""Weights that lie in the memory of several ranks, as rectangles that another process can read there."""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from lightning_megatron_rl.weights.cuda_memory import Handle


class Readiness(IntEnum):
    """Whether a rank's sampler can read weights where they lie."""

    CANNOT = 0  # it does not know yet what goes where in its model, or has no way to the memory
    NEEDS_PLACES = 1
    KNOWS_PLACES = 2


@dataclass(frozen=True)
class LentPiece:
    """A rectangle of a weight, and where its rows lie in a rank's memory."""

    memory: int  # number of the memory
    offset: int  # bytes from its start to the rectangle
    blocks: int  # of rows
    size: int  # rows of each block
    step: int  # elements from a block to the next
    stride: int  # elements from a row to the next
    width: int  # columns
    row: int  # of the weight as a matrix, where the rectangle starts
    column: int


@dataclass(frozen=True)
class LentWeight:
    """One weight and the rectangles that it consists of."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[LentPiece, ...]


@dataclass(frozen=True)
class LentMemory:
    """A block of one rank's memory."""

    gpu: str  # `cuda_memory.identity`
    handles: tuple[Handle, ...]  # one for each reader
    block: Tensor | None = None  # ``[bytes]`` uint8, the memory itself, for the only reader, in this rank's process


@dataclass(frozen=True)
class LentWeights:
    """All weights of a model, in the memory of the ranks that share it."""

    weights: dict[str, LentWeight]  # by Hugging Face name
    memories: list[LentMemory]

    @cached_property
    def num_bytes(self) -> int:
        """Size of the weights."""
        return sum(prod(weight.shape) * weight.dtype.itemsize for weight in self.weights.values())
