"""Hugging Face tensors of a split model as rectangles of parameters on several ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron_rl.weights.export_views import RowBlocks
from lightning_megatron_rl.weights.rectangles import Rectangle, matrix_shape

Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]
"""The ranks that share a model without its experts, and those that share its experts."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a Hugging Face tensor, and of the parameter that it comes from; both as matrices."""

    source: int  # who has the parameter: number of the rank in its group
    rows: RowBlocks  # of the parameter
    first_column: int  # of the parameter
    width: int  # columns
    row: int  # of the tensor, where the rectangle starts
    column: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Blocks of rows, rows of each, columns."""
        return self.rows.count, self.rows.size, self.width

    @property
    def rectangle(self) -> Rectangle:
        """The part of the tensor."""
        return Rectangle(self.row, self.column, self.rows.count * self.rows.size, self.width)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of this shape has such a rectangle."""
        rows, columns = matrix_shape(shape)
        within = self.rows.start >= 0 and self.rows.step >= 0 and self.rows.end <= rows
        return within and self.first_column >= 0 and self.first_column + self.width <= columns

    def of(self, parameter: Tensor) -> Tensor:
        """Return the rectangle of a contiguous parameter, as it lies there: `shape`."""
        columns = matrix_shape(parameter.shape)[1]
        start = int(parameter.storage_offset()) + self.rows.start * columns + self.first_column
        return parameter.as_strided(self.shape, (self.rows.step * columns, columns, 1), start)


@dataclass(frozen=True)
class TensorPlan:
    """A Hugging Face tensor and the rectangles that it consists of."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    task: int  # number of the conversion task, the same on all ranks of a group
    is_expert: bool  # which ranks share it: those of the experts, or those of everything else
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * self.dtype.itemsize
