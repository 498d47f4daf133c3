"""Turns copies recorded from whole weights into copies from their pieces on several ranks."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from lightning_megatron_rl.weights.copy_plan import CopyPlan
from lightning_megatron_rl.weights.lent import LentPiece, LentWeight
from lightning_megatron_rl.weights.placement import Placement
from lightning_megatron_rl.weights.rectangles import Rectangle, rectangle_of


def gather_copies(
    plans: Sequence[CopyPlan], weights: Mapping[str, LentWeight]
) -> tuple[list[Tensor], list[Placement]] | None:
    """Return targets and sources equivalent to the plans; None if one copies something else than a rectangle.

    Args:
        plans: Recorded with whole weights, each contiguous in one block.
        weights: The pieces that they consist of, by name.
    """
    targets: list[Tensor] = []
    sources: list[Placement] = []
    for plan in plans:
        if {place.block for place in [*plan.placements, *plan.sources]} - {0}:
            return None
        wholes = sorted(plan.placements, key=lambda whole: whole.offset)
        starts = [whole.offset for whole in wholes]
        for target, source in zip(plan.targets, plan.sources, strict=True):
            whole = wholes[bisect_right(starts, source.offset) - 1]
            weight = weights.get(whole.name)
            if weight is None or (weight.shape, weight.dtype) != (whole.shape, whole.dtype):
                return None
            rectangle = _rectangle(source, whole)
            if rectangle is None:
                return None
            try:
                matrix = target.view(rectangle.rows, rectangle.columns)
            except RuntimeError:  # its rows lie apart
                return None
            covered = 0
            for part, place in _pieces(rectangle, weight):
                rows = matrix.narrow(0, part.row - rectangle.row, part.rows)
                targets.append(rows.narrow(1, part.column - rectangle.column, part.columns))
                sources.append(place)
                covered += part.size
            if covered != rectangle.size:
                return None
    return targets, sources


def _rectangle(source: Placement, whole: Placement) -> Rectangle | None:
    """Return what part of a weight, as a matrix, was copied; None if it is not a rectangle."""
    return rectangle_of(
        source.shape, source.stride, (source.offset - whole.offset) // source.dtype.itemsize, whole.shape
    )


def _pieces(rectangle: Rectangle, weight: LentWeight) -> Iterator[tuple[Rectangle, Placement]]:
    """Yield the parts of a rectangle that lie in one block of rows each, and where they lie."""
    for piece in weight.pieces:
        for block in range(piece.blocks):
            rows = Rectangle(piece.row + block * piece.size, piece.column, piece.size, piece.width)
            part = rectangle.common(rows)
            if part is not None:
                yield part, _place(piece, block, part, rows, weight)


def _place(piece: LentPiece, block: int, part: Rectangle, rows: Rectangle, weight: LentWeight) -> Placement:
    first = block * piece.step + (part.row - rows.row) * piece.stride + part.column - rows.column
    return Placement(
        "",
        piece.memory,
        weight.dtype,
        (part.rows, part.columns),
        (piece.stride, 1),
        piece.offset + first * weight.dtype.itemsize,
    )
