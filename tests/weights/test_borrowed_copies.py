"""Copies out of weights that lie scattered over several memories do what loading the whole weights does."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron_rl.weights.borrowed_copies import gather_copies
from lightning_megatron_rl.weights.copies import Copies
from lightning_megatron_rl.weights.copy_plan import CopyPlan, record_copies
from lightning_megatron_rl.weights.lent import LentPiece, LentWeight
from lightning_megatron_rl.weights.placement import Placement, fill_buckets, view_all
from tests.weights.test_copy_plan import ROWS, WIDTH, Fused, weights

STEP, STRIDE = 7, 9  # rows from block to block, and elements from row to row: of matrices larger than the pieces


class Scattered:
    """Weights that are cut up and put into several memories, each piece in a larger matrix of its own."""

    def __init__(self, num_memories: int) -> None:
        self.blocks = [torch.zeros(64 * 1024, dtype=torch.uint8) for _ in range(num_memories)]
        self.ends = [16] * num_memories
        self.weights: dict[str, LentWeight] = {}

    def add(self, name: str, tensor: Tensor, *, rows: int, columns: int, size: int) -> None:
        """Cut a weight into pieces of at most so many rows and columns, whose rows lie in blocks of `size`."""
        matrix = tensor.reshape(tensor.shape[0], -1)
        pieces = []
        for row in range(0, matrix.shape[0], rows):
            for column in range(0, matrix.shape[1], columns):
                part = matrix[row : row + rows, column : column + columns]
                pieces.append(self._put(part, row, column, min(size, len(part))))
        self.weights[name] = LentWeight(tuple(tensor.shape), tensor.dtype, tuple(pieces))

    def _put(self, part: Tensor, row: int, column: int, size: int) -> LentPiece:
        memory = len(self.ends) - 1 - row % len(self.ends)
        count, width = len(part) // size, part.shape[1]
        shape, strides = (count, size, width), (STEP * STRIDE, STRIDE, 1)
        offset = self.ends[memory]
        place = Placement("", memory, part.dtype, shape, strides, offset)
        place.view(self.blocks).copy_(part.reshape(shape))
        self.ends[memory] += count * STEP * STRIDE * part.itemsize
        return LentPiece(memory, offset, count, size, STEP * STRIDE, STRIDE, width, row, column)


def record_in_buckets(model: Fused, named: list[tuple[str, Tensor]], capacity: int) -> list[CopyPlan]:
    plans = []
    for bucket, placements in fill_buckets(named, capacity):
        plan = record_copies(model.load_weights, [bucket], placements, model.parameters())
        assert plan is not None
        plans.append(plan)
    return plans


def scattered(named: list[tuple[str, Tensor]], rows: int, columns: int, size: int) -> Scattered:
    found = Scattered(3)
    for name, tensor in named:
        found.add(name, tensor, rows=rows, columns=columns, size=size)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("rows", "columns", "size"), [(4, 6, 4), (4, 6, 2), (2, 6, 2), (2, 6, 1), (4, 2, 1), (1, 4, 1), (3, 5, 1)]
)
def test_pieces_are_copied_as_the_whole_is(rank, rows, columns, size, dtype):
    """Split by rows, by columns and by both, at other places than the model splits, in blocks of rows."""
    model, expected = Fused(rank).to(dtype), Fused(rank).to(dtype)
    plans = record_in_buckets(model, weights(1, dtype), capacity=256)
    assert len(plans) > 1
    named = weights(2, dtype)
    expected.load_weights(named)
    lent = scattered(named, rows, columns, size)
    copies = gather_copies(plans, lent.weights)
    assert copies is not None
    targets, sources = copies
    Copies(targets, view_all(sources, lent.blocks)).run()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))


class Vectors(torch.nn.Module):
    """A norm, half of a bias, experts that come stacked, and one number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.zeros(8))
        self.bias = torch.nn.Parameter(torch.zeros(4))
        self.experts = torch.nn.Parameter(torch.zeros(3, 2, 6))
        self.scale = torch.nn.Parameter(torch.zeros(1))

    def load_weights(self, named: Any) -> None:
        for name, loaded in named:
            if name == "norm":
                self.norm.data.copy_(loaded)
            elif name == "bias":
                self.bias.data.copy_(loaded[4:])
            elif name == "scale":
                self.scale.data.copy_(loaded)
            else:
                self.experts.data.copy_(loaded[:, 2:])


def vectors(seed: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"norm": (8,), "bias": (8,), "experts": (3, 4, 6), "scale": (1,)}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


@pytest.mark.parametrize("rows", [8, 3])
def test_vectors_and_stacks(rows):
    model, expected = Vectors(), Vectors()
    plans = record_in_buckets(model, vectors(1), capacity=4096)  # type: ignore[arg-type]
    expected.load_weights(vectors(2))
    lent = Scattered(2)
    for name, tensor in vectors(2):
        matrix = tensor.reshape(len(tensor), -1)
        offset = lent.ends[0]
        Placement("", 0, tensor.dtype, tuple(matrix.shape), tuple(matrix.stride()), offset).view(lent.blocks).copy_(
            matrix
        )
        lent.ends[0] += tensor.nbytes
        width = matrix.shape[1]
        cut = [(row, min(rows, len(matrix) - row)) for row in range(0, len(matrix), rows)]
        pieces = [
            LentPiece(0, offset + row * width * 4, 1, count, count * width, width, width, row, 0) for row, count in cut
        ]
        lent.weights[name] = LentWeight(tuple(tensor.shape), tensor.dtype, tuple(pieces))
    copies = gather_copies(plans, lent.weights)
    assert copies is not None
    targets, sources = copies
    Copies(targets, view_all(sources, lent.blocks)).run()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))


def test_what_is_not_all_there_is_refused():
    named = weights(1)
    plans = record_in_buckets(Fused(0), named, capacity=4096)
    lent = scattered(named, ROWS, WIDTH, ROWS)
    assert gather_copies(plans, lent.weights) is not None
    down = lent.weights["down"]
    for other in (
        None,
        replace(down, pieces=()),
        replace(down, pieces=tuple(replace(piece, size=ROWS - 1) for piece in down.pieces)),
        replace(down, dtype=torch.bfloat16),
        replace(down, shape=(WIDTH, ROWS)),
    ):
        changed = {name: weight for name, weight in lent.weights.items() if name != "down"}
        changed |= {} if other is None else {"down": other}
        assert gather_copies(plans, changed) is None


def test_a_copy_of_something_else_than_a_rectangle_is_refused():
    """Every other row, every other column, a transposed one: what no list of rectangles of rows says."""
    for part in (lambda loaded: loaded[::2], lambda loaded: loaded[:, ::2], lambda loaded: loaded.T):
        named = [("w", torch.randn(4, 6))]

        class Model(torch.nn.Module):
            def __init__(self, shape: torch.Size) -> None:
                super().__init__()
                self.w = torch.nn.Parameter(torch.zeros(shape))

            def load_weights(self, named: Any, part: Any = part) -> None:
                for _, loaded in named:
                    self.w.data.copy_(part(loaded))

        plans = record_in_buckets(Model(part(named[0][1]).shape), named, capacity=4096)  # type: ignore[arg-type]
        lent = scattered(named, 4, 6, 4)
        assert gather_copies(plans, lent.weights) is None
