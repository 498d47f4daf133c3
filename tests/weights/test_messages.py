"""Messages from ranks to workers: exactly what each worker reads, each element once, from a rank that has it."""

import json
from dataclasses import dataclass
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatron_rl.weights.copies import Copies
from lightning_megatron_rl.weights.messages import (
    HeldPart,
    HeldTensor,
    Message,
    can_send,
    empty_tensors,
    packing_views,
    plan_messages,
    read_message,
)
from lightning_megatron_rl.weights.reads import Read
from lightning_megatron_rl.weights.rectangles import Rectangle, disjoint, matrix_shape
from tests.properties import PROPERTY, SEEDS

SHAPES = ((), (7,), (1, 5), (12, 8), (9, 2, 4), (16, 3))
DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class Case:
    """A model on some ranks, and what workers read."""

    tensors: dict[str, Tensor]
    held: list[dict[str, HeldTensor]]
    reads: list[dict[str, Read]]
    limit: int

    @property
    def holdings(self) -> list[dict]:
        return [{name: tensor.holding for name, tensor in of_rank.items()} for of_rank in self.held]


def grid(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Rectangle]:
    """A matrix cut into rows, or into columns, as tensor parallelism does; or as one."""
    rows, columns = matrix_shape(shape)
    down = draw(st.booleans())
    size = rows if down else columns
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))) if size > 1 else []
    spans = list(zip([0, *cuts], [*cuts, size], strict=True))
    if down:
        return [Rectangle(first, 0, last - first, columns) for first, last in spans]
    return [Rectangle(0, first, rows, last - first) for first, last in spans]


def lay(draw: st.DrawFn, tensor: Tensor, part: Rectangle) -> HeldPart:
    """Put a part into memory as a fused parameter has it: in blocks of rows that lie apart, among other columns."""
    size = draw(st.sampled_from([n for n in range(1, part.rows + 1) if part.rows % n == 0]))
    memory = torch.full((part.rows // size, size + draw(st.integers(0, 2)), part.columns + 3), -1.0).to(tensor.dtype)
    view = memory[:, :size, 1 : 1 + part.columns]
    view.copy_(part.of(tensor.view(matrix_shape(tensor.shape))).reshape(view.shape))
    return HeldPart(part, view)


def some(draw: st.DrawFn, shape: tuple[int, ...]) -> Rectangle:
    rows, columns = matrix_shape(shape)
    row, column = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
    return Rectangle(row, column, draw(st.integers(1, rows - row)), draw(st.integers(1, columns - column)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    generator = torch.Generator().manual_seed(draw(SEEDS))
    ranks, workers = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    tensors: dict[str, Tensor] = {}
    held: list[dict[str, list[HeldPart]]] = [{} for _ in range(ranks)]
    reads: list[dict[str, Read]] = [{} for _ in range(workers)]
    for number in range(draw(st.integers(1, 5))):
        shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
        name = f"weight.{number}"
        tensor = tensors[name] = torch.randn(shape, generator=generator).to(dtype)
        for part in grid(draw, shape):  # a stage, an expert's rank or several copies have it
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                held[rank].setdefault(name, []).append(lay(draw, tensor, part))
        for worker in range(workers):
            parts = disjoint([some(draw, shape) for _ in range(draw(st.integers(0, 3)))])
            reads[worker][name] = Read(shape, dtype, tuple(parts))
    placed = [
        {
            name: HeldTensor(tuple(tensors[name].shape), tensors[name].dtype, tuple(parts))
            for name, parts in of_rank.items()
        }
        for of_rank in held
    ]
    return Case(tensors, placed, reads, draw(st.sampled_from([1, 16, 50, 10_000])))


@PROPERTY
@given(cases())
def test_each_worker_gets_what_it_reads_and_each_element_once(case):
    plan = plan_messages(case.holdings, case.reads, case.limit)
    assert plan is not None
    for worker, reads in enumerate(case.reads):
        tensors, shapes = empty_tensors(reads), {name: read.shape for name, read in reads.items()}
        counts = {name: torch.zeros(matrix_shape(read.shape)) for name, read in reads.items()}
        for rank, held in enumerate(case.held):
            for message in plan[rank][worker]:
                longest = max(case.limit, message.parts[0].dtype.itemsize)  # one element is sent in any case
                assert message.num_bytes <= longest
                told = Message.from_plain(json.loads(json.dumps(message.to_plain())), shapes)
                assert told == message
                packed = torch.empty(message.num_bytes, dtype=torch.uint8)
                Copies(*packing_views(message, held, packed)).run()
                read_message(told, packed, tensors)
                for part in message.parts:
                    part.rectangle.of(counts[part.name]).add_(1)
        for name, read in reads.items():
            wanted = torch.zeros(matrix_shape(read.shape))
            for part in read.parts:
                part.of(wanted).fill_(1)
                expected = part.of(case.tensors[name].view(matrix_shape(read.shape)))
                assert torch.equal(part.of(tensors[name].view(matrix_shape(read.shape))), expected)
            assert torch.equal(counts[name], wanted)


@PROPERTY
@given(cases(), st.data())
def test_what_no_rank_has_is_not_planned(case, data):
    """One part is gone: whoever reads an element of it gets no plan."""
    rank = data.draw(st.sampled_from([rank for rank, held in enumerate(case.holdings) if held]))
    name = data.draw(st.sampled_from(sorted(case.holdings[rank])))
    lost = case.holdings[rank][name].parts[0]
    holdings = case.holdings
    for of_rank in holdings:
        if name in of_rank:
            kept = tuple(part for part in of_rank[name].parts if part != lost)
            of_rank[name] = type(of_rank[name])(of_rank[name].shape, of_rank[name].dtype, kept)
    is_read = any(part.common(lost) for reads in case.reads for part in reads[name].parts)
    assert (plan_messages(holdings, case.reads, case.limit) is None) == is_read


def whole(shape: tuple[int, ...]) -> HeldTensor:
    tensor = torch.zeros(shape)
    part = HeldPart(Rectangle.whole(shape), tensor.view(1, *matrix_shape(shape)))
    return HeldTensor(shape, tensor.dtype, (part,))


def test_copies_are_shared_out_between_the_ranks_that_have_them():
    holdings = [{f"norm.{n}": whole((64,)).holding for n in range(8)} | {"big": whole((64, 64)).holding}] * 4
    reads = {name: Read(held.shape, held.dtype, (Rectangle.whole(held.shape),)) for name, held in holdings[0].items()}
    plan = plan_messages(holdings, [reads], 1024)
    assert plan is not None
    sent = [sum(message.num_bytes for message in of_rank[0]) for of_rank in plan]
    assert sum(sent) == 4 * (8 * 64 + 64 * 64)
    assert max(sent) - min(sent) <= 1024


@pytest.mark.parametrize(("shape", "dtype"), [((8, 4), torch.bfloat16), ((8, 5), torch.float32)])
def test_tensors_of_another_kind_are_other_weights(shape, dtype):
    reads = {"a": Read((8, 4), torch.float32, (Rectangle(0, 0, 1, 4),))}
    holdings = {"a": whole((8, 4)).holding}
    assert can_send([holdings], reads)
    other = {"a": type(holdings["a"])(shape, dtype, holdings["a"].parts)}
    assert not can_send([other], reads)
    assert not can_send([holdings, other], reads)
    assert not can_send([{}], reads)
    assert plan_messages([other], [reads], 100) is None


@PROPERTY
@given(st.data())
def test_rectangles_that_do_not_overlap_are_the_union(data):
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    given_ = [some(data.draw, shape) for _ in range(data.draw(st.integers(0, 5)))]
    counts, wanted = torch.zeros(shape), torch.zeros(shape)
    for rectangle in given_:
        rectangle.of(wanted).fill_(1)
    for rectangle in disjoint(given_):
        rectangle.of(counts).add_(1)
    assert torch.equal(counts, wanted)


def test_a_part_that_is_none_of_its_tensor_is_refused():
    for plain in ([0, 0, 9, 4], [0, 1, 8, 4], [-1, 0, 2, 2], [0, 0, 0, 4]):
        with pytest.raises(ValueError, match=r"of \(8, 4\)"):
            Rectangle.from_plain(plain, (8, 4))
    assert prod((8, 4)) == Rectangle.from_plain([0, 0, 8, 4], (8, 4)).size
