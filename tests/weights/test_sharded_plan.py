"""Plans of a model that is split over ranks, with conversions of the tests' own: what is planned, what is refused."""

import dataclasses
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.weights.test_sharded_views import differences


@dataclasses.dataclass
class Task:
    """As much of a conversion task as a plan needs."""

    param_weight: Tensor | None
    mapping: Any = dataclasses.field(default_factory=lambda: SimpleNamespace(is_expert=False))
    name: str | None = None  # of its tensor; None: by its place among those that are converted together


def swap_inside(whole: Tensor) -> Tensor:
    """Exchange two elements that are neither in the first row nor in the first column."""
    whole = whole.clone()
    whole[2, 2], whole[3, 3] = whole[3, 3].clone(), whole[2, 2].clone()
    return whole


def gathered(dim: int, change: Any) -> Any:
    """A conversion that puts the parts of all ranks side by side along `dim` and changes what comes out."""

    def convert(tasks: Iterable[Task]) -> Iterator[tuple[str, Tensor]]:
        for number, task in enumerate(tasks):
            assert task.param_weight is not None
            parts = [torch.empty_like(task.param_weight) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, task.param_weight)
            yield task.name or f"weight.{number}", change(torch.cat(parts, dim))

    return convert


def reversed_on_the_last_rank(whole: Tensor) -> Tensor:
    """What differs on one rank only."""
    return whole.flip(0) if dist.get_rank() == dist.get_world_size() - 1 else whole


CHANGES: dict[str, Any] = {
    "rows": (0, lambda whole: whole),
    "columns": (1, lambda whole: whole),
    "rows cut off": (0, lambda whole: whole[:-3]),
    "columns cut off": (1, lambda whole: whole[:, 5:-3].contiguous()),
    "halves exchanged": (0, lambda whole: torch.cat([whole[len(whole) // 2 :], whole[: len(whole) // 2]])),
    "positive": (0, torch.abs),
    "more by one": (0, lambda whole: whole + 1),
    "swapped inside": (0, swap_inside),
    "transposed": (0, lambda whole: whole.T.contiguous()),
    "irregular rows": (0, lambda whole: whole[torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))]),
    "columns turned round": (0, lambda whole: whole.flip(1)),
    "nothing": (0, lambda whole: whole[:0]),
    "different on one rank": (0, reversed_on_the_last_rank),
}
PLANNED = ("rows", "columns", "rows cut off", "columns cut off", "halves exchanged")


def plan_of(
    change: str, shapes: list[tuple[int, int]], dtype: torch.dtype, names: tuple[str | None, str | None] = (None, None)
) -> tuple[list[str] | None, list[str]]:
    """What differs by a plan, or None if there is none; and what was said about it."""
    from lightning_megatron_rl.weights import sharded_plan

    generator = torch.Generator().manual_seed(dist.get_rank())
    tasks = [
        Task(torch.randn(shape, generator=generator).to(dtype), name=name)
        for shape, name in zip(shapes, names, strict=True)
    ]
    convert = gathered(*CHANGES[change])
    world: Any = dist.group.WORLD
    with mock.patch("lightning.pytorch.utilities.rank_zero.rank_zero_info") as info:
        views = sharded_plan.plan_sharded_views(tasks, convert, (world, world))
    said = [call.args[0] for call in info.call_args_list]
    return None if views is None else differences(list(views.weights().tensors()), list(convert(tasks))), said


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_is_made_of_what_only_moves_rows_and_columns(worker_pool, change):
    for different, said in worker_pool.run(plan_of, change, [(12, 12)] * 2, torch.bfloat16, world_size=2):
        if change in PLANNED:
            assert different == []
            assert not said
        else:
            assert different is None
            assert len(said) == 1
            assert "weight.0 is not made of rows and columns" in said[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("change", "shape"), [("rows", (70_000, 2)), ("columns", (3, 70_000))])
def test_numbers_of_several_digits(worker_pool, change, shape, dtype):
    results = worker_pool.run(plan_of, change, [shape] * 2, dtype, world_size=2)
    assert results == [([], []), ([], [])]


def count_conversions(shape: tuple[int, int], dtype: torch.dtype) -> list[int]:
    """How many weights each conversion of a plan has."""
    from lightning_megatron_rl.weights.sharded_plan import plan_sharded_views

    weights = {"large": torch.zeros(shape, dtype=dtype), "small": torch.zeros(2, 2, dtype=dtype)}
    tasks = [Task(weight, name=name) for name, weight in weights.items()]
    converted: list[int] = []

    def convert(tasks: Any) -> Iterator[tuple[str, Tensor]]:
        converted.append(len(tasks))
        yield from gather(tasks)

    gather = gathered(*CHANGES["rows"])
    world: Any = dist.group.WORLD
    assert plan_sharded_views(tasks, convert, (world, world)) is not None
    return converted


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((128, 127), torch.bfloat16, [2, 2]),  # 2 · 128 · 127 < 0x7F80, infinity in bf16
        ((128, 128), torch.bfloat16, [2, 1, 2]),
        ((128, 128), torch.float32, [2, 2]),
    ],
)
def test_a_plan_takes_few_conversions(worker_pool, shape, dtype, expected):
    """Those of digits, and that of the weights themselves."""
    assert worker_pool.run(count_conversions, shape, dtype, world_size=2) == [expected] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8])
def test_digits_are_finite_and_tell_each_other_apart(dtype):
    from lightning_megatron_rl.weights.sharded_plan import _base, _bits, _DigitTensors

    base = _base([dtype])
    digits = _DigitTensors(1, base).like(torch.empty(2, base, dtype=dtype), 0, (2, base))
    assert digits.dtype == dtype
    assert digits.float().isfinite().all()
    assert torch.equal(_bits(digits).long(), torch.arange(base).expand(2, -1))
    assert _base([dtype, torch.float32]) == base


@pytest.mark.parametrize("names", [("small", "large"), (None, None)], ids=["of its own", "by place"])
def test_large_weights_are_numbered_without_small_ones(worker_pool, names):
    """A conversion that makes something else of a weight alone than among others has no plan."""
    shapes = [(3, 3), (3000, 12)]
    for different, said in worker_pool.run(plan_of, "rows", shapes, torch.bfloat16, names, world_size=2):
        assert different == (None if None in names else [])
        assert len(said) == (1 if None in names else 0)
