"""Hugging Face tensors as views of Megatron's parameters, planned once: no conversion and no copy in later exports.

Megatron-Bridge converts a weight by moving whole rows: fused projections are taken apart, padding is cut off. What it
does with a parameter's row numbers says which rows of the parameter each Hugging Face tensor consists of.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron_rl.parallel.distributed import ReplicaGroup
from lightning_megatron_rl.weights.direct import DirectPush, DirectRanks, held_views
from lightning_megatron_rl.weights.messages import HeldTensor
from lightning_megatron_rl.weights.source import WeightSource, WeightView, WeightViews

Convert = Callable[[Iterable[Any]], Iterable[tuple[str, Tensor]]]
"""From conversion tasks to Hugging Face names and tensors, each task's before the next task is taken."""


@dataclass(frozen=True)
class RowBlocks:
    """Rows of a parameter: `count` blocks of `size` rows, the first at `start`, each `step` rows after the one before.

    Example:
        The keys of a fused projection with 4 rows of queries and 2 of keys and of values per group, two groups:
        ``RowBlocks(start=4, size=2, step=8, count=2)``.
    """

    start: int
    size: int
    step: int
    count: int

    @property
    def end(self) -> int:
        """The row after the last one."""
        return self.start + (self.count - 1) * self.step + self.size

    def view(self, parameter: Tensor) -> Tensor:
        """Return the rows of a parameter ``[rows, ...]``, as they lie there: ``[count, size, ...]``."""
        row = parameter.stride(0)
        return parameter.as_strided(
            (self.count, self.size, *parameter.shape[1:]),
            (self.step * row, *parameter.stride()),
            parameter.storage_offset() + self.start * row,
        )


def find_blocks(rows: Tensor) -> RowBlocks | None:
    """Return row numbers ``[n]`` as blocks at equal distances, or None if they do not form such blocks."""
    breaks = (rows.diff() != 1).nonzero().flatten()
    start, total = int(rows[0]), len(rows)
    if len(breaks) == 0:
        return RowBlocks(start, size=total, step=total, count=1)
    size = int(breaks[0]) + 1
    if total % size:
        return None
    step = int(rows[size]) - start
    expected = start + step * torch.arange(total // size)[:, None] + torch.arange(size)[None]
    return RowBlocks(start, size, step, total // size) if torch.equal(rows.cpu(), expected.flatten()) else None


def same(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same numbers."""
    return tensor.dtype == other.dtype and torch.equal(tensor, other)


@dataclass(frozen=True)
class _Planned:
    name: str
    parameter: Tensor
    rows: RowBlocks
    shape: tuple[int, ...]


class ExportViews:
    """All Hugging Face tensors of a model, as parts of its parameters.

    Args:
        planned: What `plan_views` found.
    """

    def __init__(self, planned: Sequence[_Planned]) -> None:
        self._planned = planned
        self._parameters = list({id(plan.parameter): plan.parameter for plan in planned}.values())
        self._seen: tuple[list[int], bool] = [], False  # where the parameters were, and whether they stay
        self._weights: WeightSource | None = None
        self._direct: DirectRanks | None = None

    @torch.no_grad()
    def weights(self, *, stays: bool = False, replica: ReplicaGroup | None = None) -> WeightSource:
        """Return the weights in the parameters' dtype, the same views for as long as the parameters stay in place.

        Args:
            stays: Whether they do until the receiver is told to let go; see `WeightViews`.
            replica: The ranks that have the same weights, if they are to share out what goes to servers.
        """
        places = [parameter.data_ptr() for parameter in self._parameters]
        if self._weights is None or (places, stays) != self._seen:
            self._weights = WeightSource.of_views(WeightViews([_view(plan) for plan in self._planned], stays=stays))
            self._seen = places, stays
        if replica is None or len(replica.ranks) == 1:
            return self._weights
        if self._direct is None:
            self._direct = DirectRanks(self._held, self._weights.device, replica)
        push = DirectPush(self._direct)
        return dataclasses.replace(self._weights, direct=push, run_collectives=push.run, finish_collectives=push.finish)

    def _held(self) -> dict[str, HeldTensor]:
        assert self._weights is not None
        assert self._weights.whole is not None
        held = held_views(self._weights.whole)
        assert held is not None  # rows of parameters
        return held

    def let_go(self) -> None:
        """Drop all views, whose readers have let go of them, and the connections to servers."""
        self._weights = None
        if self._direct is not None:
            self._direct.close()


def _view(plan: _Planned) -> WeightView:
    view = plan.rows.view(plan.parameter.detach())
    return WeightView(plan.name, view if plan.rows.count > 1 else view.view(plan.shape), plan.shape)


@torch.no_grad()
def plan_views(tasks: Sequence[Any], convert: Convert, exported: Iterable[tuple[str, Tensor]]) -> ExportViews | None:
    """Plan the views of a model that this rank has whole, or return None if its export does more than move rows.

    Args:
        tasks: Megatron-Bridge's conversion tasks.
        convert: Its conversion.
        exported: What it makes of the weights; every view is compared with it, bit by bit.
    """
    numbered = ReplacedWeights(tasks, lambda task: _row_numbers(task.param_weight))
    planned = []
    for name, rows in convert(numbered):
        parameter = tasks[numbered.turn].param_weight
        if rows.dim() != parameter.dim() or rows.is_floating_point() or rows.numel() == 0:
            return None
        blocks = find_blocks(rows.reshape(rows.shape[0], -1)[:, 0].cpu())
        if blocks is None or blocks.end > parameter.shape[0]:
            return None
        planned.append(_Planned(name, parameter, blocks, tuple(rows.shape)))
    by_name = {plan.name: plan for plan in planned}
    count = 0
    for name, tensor in exported:
        plan = by_name.get(name)
        if plan is None or plan.shape != tuple(tensor.shape) or plan.shape[1:] != tuple(plan.parameter.shape[1:]):
            return None
        if not same(plan.rows.view(plan.parameter).reshape(plan.shape), tensor):
            return None
        count += 1
    return ExportViews(planned) if count == len(by_name) == len(planned) else None


class ReplacedWeights:
    """Conversion tasks with other tensors in place of their weights.

    Args:
        tasks: Megatron-Bridge's.
        replacement: Of a task's weight; made when the task is its turn, so that one exists at a time.
    """

    def __init__(self, tasks: Sequence[Any], replacement: Callable[[Any], Tensor]) -> None:
        self._tasks = tasks
        self._replacement = replacement
        self.turn = 0  # number of the task that is converted

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Any]:
        for number, task in enumerate(self._tasks):
            self.turn = number
            is_here = task.param_weight is not None  # not of another pipeline stage
            yield dataclasses.replace(task, param_weight=self._replacement(task)) if is_here else task


def _row_numbers(weight: Tensor) -> Tensor:
    """A tensor like `weight` with each element replaced by the number of its row."""
    numbers = torch.arange(weight.shape[0], device=weight.device)
    return numbers.view(-1, *[1] * (weight.dim() - 1)).expand(weight.shape)
