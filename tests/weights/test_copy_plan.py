"""A model's own loading becomes a list of copies; what is more than copies does not."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_megatron_rl.weights.copy_plan import CopyPlan, record_copies
from lightning_megatron_rl.weights.placement import place
from lightning_megatron_rl.weights.source import WeightView, WeightViews

ROWS, WIDTH = 4, 6


class Fused(nn.Module):
    """Loads as vLLM's models do: q, k and v of one rank of two into one parameter, experts into a stack of them."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.qkv = nn.Parameter(torch.zeros(3 * ROWS // 2, WIDTH))
        self.down = nn.Parameter(torch.zeros(ROWS, WIDTH // 2))
        self.experts = nn.Parameter(torch.zeros(2, ROWS, WIDTH))
        self.prepare: Callable[[Tensor], Tensor] = lambda loaded: loaded

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, loaded in weights:
            loaded = self.prepare(loaded)
            half = ROWS // 2
            if name in ("q", "k", "v"):
                start = "qkv".index(name) * half
                self.qkv.data.narrow(0, start, half).copy_(loaded.narrow(0, self.rank * half, half))
            elif name == "down":
                self.down.data.copy_(loaded.narrow(1, self.rank * WIDTH // 2, WIDTH // 2))
            else:
                self.experts.data[int(name[-1])].copy_(loaded)


def weights(seed: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, Tensor]]:
    """All from one buffer, as the trainer's."""
    generator = torch.Generator().manual_seed(seed)
    names = ["q", "k", "v", "down", "expert0", "expert1"]
    buffer = torch.randn(len(names) * ROWS * WIDTH, generator=generator).to(dtype)
    return [(name, part.view(ROWS, WIDTH)) for name, part in zip(names, buffer.split(ROWS * WIDTH), strict=True)]


def record(model: Fused, named: list[tuple[str, Tensor]]) -> CopyPlan | None:
    return record_copies(model.load_weights, *place(WeightViews.of(named).views), model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1])
def test_replay_does_what_loading_does(rank, dtype):
    model, expected = Fused(rank), Fused(rank)
    plan = record(model, weights(1, dtype))
    assert plan is not None
    assert len(plan.targets) == 6
    expected.load_weights(weights(1, dtype))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))
    plan.run(place(WeightViews.of(weights(2, dtype)).views)[0])
    expected.load_weights(weights(2, dtype))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize(
    "prepare",
    [lambda loaded: loaded * 2, lambda loaded: loaded.double(), lambda loaded: loaded.flip(0)],
    ids=["product", "dtype", "other rows"],
)
def test_more_than_copies_is_no_plan(prepare):
    """The values are loaded all the same, and the next update will be, too."""
    model = Fused(0)
    model.prepare = prepare
    named = weights(1)
    assert record(model, named) is None
    assert torch.equal(model.experts[1], prepare(named[-1][1]).float())


def test_copies_to_other_places_are_no_plan():
    """What is put aside and used later would be stale."""
    model = Fused(0)
    aside = torch.zeros(ROWS, WIDTH)

    def keep(loaded: Tensor) -> Tensor:
        aside.copy_(loaded)
        return loaded

    model.prepare = keep
    assert record(model, weights(1)) is None


class Fusion(nn.Module):
    """Loads queries and keys of one rank of two into one parameter, from tensors of whole groups."""

    def __init__(self, rank: int, num_rows: int) -> None:
        super().__init__()
        self.rank, self.num_rows = rank, num_rows
        self.qk = nn.Parameter(torch.zeros(2 * num_rows, WIDTH))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, loaded in weights:
            start = "qk".index(name) * self.num_rows
            part = loaded.narrow(0, self.rank * self.num_rows, self.num_rows)
            self.qk.data.narrow(0, start, self.num_rows).copy_(part)


def fused(seed: int, dtype: torch.dtype, width: int = WIDTH) -> WeightViews:
    """Two groups, each with four rows of queries and four of keys, as a trainer's fused projection has them."""
    matrix = torch.randn(16, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    step = (8 * width, width, 1)
    views = [matrix.as_strided((2, 4, width), step, start * width) for start in (0, 4)]
    return WeightViews([WeightView(name, view, (8, width)) for name, view in zip("qk", views, strict=True)], stays=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "num_rows"), [(0, 8), (0, 4), (1, 4)], ids=["all", "first group", "second group"])
def test_rows_that_lie_apart_are_read_where_they_lie(rank, num_rows, dtype):
    """bf16 of six numbers are no multiple of eight bytes: copied as they are; fp32 as numbers of eight bytes."""
    model, expected = Fusion(rank, num_rows).to(dtype), Fusion(rank, num_rows).to(dtype)
    weights = fused(1, dtype)
    plan = record_copies(model.load_weights, *place(weights.views), model.parameters())
    assert plan is not None
    expected.load_weights(weights)
    assert torch.equal(model.qk, expected.qk)
    for seed in (2, 3):
        weights = fused(seed, dtype)
        plan.run(place(weights.views)[0])
        expected.load_weights(weights)
        assert torch.equal(model.qk, expected.qk)


def test_one_copy_of_rows_that_lie_apart_is_there_at_a_time():
    """A whole model's would be some GB, in the worker's share of the GPU."""
    model = Fusion(0, 8)
    weights = fused(1, torch.float32)
    copies: list[StorageWeakRef] = []

    def load(named: Iterable[tuple[str, Tensor]]) -> None:
        for name, loaded in named:
            assert all(copy.expired() for copy in copies)
            copies.append(StorageWeakRef(loaded.untyped_storage()))
            model.load_weights([(name, loaded)])
            del loaded

    assert record_copies(load, *place(weights.views), model.parameters()) is not None
    assert len(copies) == 2


def test_parts_of_rows_that_lie_apart_are_no_plan():
    """Three rows of a group of four: more than whole groups are loaded by the model itself in every update."""
    model = Fusion(1, 3)
    weights = fused(1, torch.float32)
    assert record_copies(model.load_weights, *place(weights.views), model.parameters()) is None
    expected = Fusion(1, 3)
    expected.load_weights(weights)
    assert torch.equal(model.qk, expected.qk)


def test_memory_that_stays_is_held_until_the_plan_lets_go():
    model = Fusion(0, 8)
    weights = fused(1, torch.float32)
    plan = record_copies(model.load_weights, *place(weights.views), model.parameters())
    assert plan is not None
    memory = StorageWeakRef(weights.views[0].view.untyped_storage())
    plan.run(place(weights.views)[0], stays=True)
    weights.views[0].view.mul_(2)
    plan.run(place(weights.views)[0], stays=True)  # views are held, values are not
    assert torch.equal(model.qk[:8], weights[0][1])
    other = fused(2, torch.float32)
    plan.run(place(other.views)[0], stays=True)  # other memory is looked at anew
    assert torch.equal(model.qk[8:], other[1][1])
    del weights
    assert memory.expired()
    memory = StorageWeakRef(other.views[0].view.untyped_storage())
    del other
    assert not memory.expired()
    plan.let_go()
    assert memory.expired()
