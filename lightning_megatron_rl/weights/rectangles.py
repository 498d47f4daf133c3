"""Parts of tensors, taken as matrices, that are rectangles: what lies where, what is read, and what both have."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from lightning_megatron_rl.weights.placement import merge_dimensions


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a tensor: its first dimension, and all others as one; a vector has one column."""
    return prod(shape[:1]), prod(shape[1:])


@dataclass(frozen=True)
class Rectangle:
    """A part of a matrix."""

    row: int
    column: int
    rows: int
    columns: int

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Rectangle":
        """Return all of a tensor."""
        return cls(0, 0, *matrix_shape(shape))

    @property
    def size(self) -> int:
        """Elements."""
        return self.rows * self.columns

    def common(self, other: "Rectangle") -> "Rectangle | None":
        """Return the intersection."""
        row, column = max(self.row, other.row), max(self.column, other.column)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        columns = min(self.column + self.columns, other.column + other.columns) - column
        return Rectangle(row, column, rows, columns) if rows > 0 and columns > 0 else None

    def without(self, other: "Rectangle") -> "list[Rectangle]":
        """Return what is left of it, in parts that do not overlap."""
        hole = self.common(other)
        if hole is None:
            return [self]
        below, right = hole.row + hole.rows, hole.column + hole.columns
        sides = (
            Rectangle(self.row, self.column, hole.row - self.row, self.columns),
            Rectangle(below, self.column, self.row + self.rows - below, self.columns),
            Rectangle(hole.row, self.column, hole.rows, hole.column - self.column),
            Rectangle(hole.row, right, hole.rows, self.column + self.columns - right),
        )
        return [side for side in sides if side.size]

    def pieces(self, size: int) -> "Iterator[Rectangle]":
        """Yield it in parts of at most `size` elements: whole rows, or parts of rows if one is more."""
        rows, columns = max(1, size // self.columns), min(self.columns, size)
        for row in range(0, self.rows, rows):
            for column in range(0, self.columns, columns):
                height, width = min(rows, self.rows - row), min(columns, self.columns - column)
                yield Rectangle(self.row + row, self.column + column, height, width)

    def of(self, matrix: Tensor) -> Tensor:
        """Return the part itself, a view."""
        return matrix.narrow(0, self.row, self.rows).narrow(1, self.column, self.columns)

    def to_plain(self) -> list[int]:
        """Return it as JSON has it."""
        return [self.row, self.column, self.rows, self.columns]

    @classmethod
    def from_plain(cls, plain: Any, shape: Sequence[int]) -> "Rectangle":
        """Return what `to_plain` was given.

        Raises:
            ValueError: It is no part of a tensor of this shape.
        """
        row, column, rows, columns = (int(number) for number in plain)
        found, whole = cls(row, column, rows, columns), cls.whole(shape)
        if min(rows, columns) < 1 or found.common(whole) != found:
            raise ValueError(f"rows {row} to {row + rows}, columns {column} to {column + columns} of {tuple(shape)}")
        return found


def disjoint(rectangles: Iterable[Rectangle]) -> list[Rectangle]:
    """Return the union of rectangles as some that do not overlap."""
    found: list[Rectangle] = []
    for rectangle in sorted(set(rectangles), key=lambda one: (-one.size, one.row, one.column)):
        left = [rectangle]
        for other in found:
            left = [part for old in left for part in old.without(other)]
        found += left
    return sorted(found, key=lambda one: (one.row, one.column))


def rectangle_of(shape: Sequence[int], stride: Sequence[int], start: int, whole: Sequence[int]) -> Rectangle | None:
    """Return what part of a contiguous tensor a view is; None if it is not a rectangle with its elements in order.

    Args:
        shape: Of the view.
        stride: Of the view. # elements
        start: The view's first element, in the tensor.
        whole: Shape of the tensor.
    """
    columns = matrix_shape(whole)[1]
    row, column = divmod(start, columns)
    dimensions = merge_dimensions(shape, stride)
    width, step = dimensions.pop() if dimensions else (1, 1)
    if step != 1:
        return None
    if not dimensions and column == 0 and width % columns == 0:
        return Rectangle(row, 0, width // columns, columns)
    rows, between = dimensions.pop() if dimensions else (1, columns)
    if dimensions or between != columns or column + width > columns:
        return None
    return Rectangle(row, column, rows, width)
