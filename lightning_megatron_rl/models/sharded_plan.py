"""Which rank's parameter each part of a Hugging Face tensor comes from, found out once through Megatron-Bridge.

Every rank lets Megatron-Bridge convert numbers in place of its weights, which say of each element whose it is, and in
which row and column. They go as digits in the weights' own dtype, so that planning holds and sends no more than some
exports do. A weight is split along its rows or its columns, so the first column and the first row of a converted tensor
tell all; what is otherwise, or more than moving, shows when the weights themselves are compared with an export.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_megatron_rl.models.export_views import Convert, ReplacedWeights, find_blocks, same
from lightning_megatron_rl.models.sharded_views import BUCKET_BYTES, Piece, ShardedViews, TensorPlan, matrix_shape

Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]
"""The ranks that share a model without its experts, and those that share its experts."""

Edges = tuple[Tensor, Tensor]
"""Numbers of a converted tensor, as a matrix: its first column [rows] and its first row [columns]."""

_BASE = 256  # of the digits: the largest whose digits are exact in bf16
_ELEMENTS = 2**22  # that are numbered at a time, 8 bytes each


@torch.no_grad()
def plan_sharded_views(
    tasks: Sequence[Any], convert: Convert, groups: Groups, bucket_bytes: int = BUCKET_BYTES
) -> ShardedViews | None:
    """Plan to export a model that is split over ranks, or return None if its export does more than move rows.

    A collective of the world, whose ranks all get a plan or all get none.

    Args:
        tasks: Megatron-Bridge's conversion tasks.
        convert: Its conversion; the plan's tensors are compared with what it makes of the weights, bit by bit.
        groups: The ranks that share a model without its experts, and those that share its experts.
        bucket_bytes: See `ShardedViews`.
    """
    parameters = [task.param_weight for task in tasks]
    found = _find_sources(tasks, convert, groups)
    plans = [_plan(*parts) for parts in found]
    if _refused(next((parts[0].name for parts, plan in zip(found, plans, strict=True) if plan is None), None)):
        return None
    agreed = _agree([plan for plan in plans if plan is not None], groups)
    if _refused(_first_misfit([parts[0] for parts in found], agreed, parameters, groups)):
        return None
    views = ShardedViews(agreed, parameters, groups, bucket_bytes)
    return None if _refused(_first_difference(views, convert(tasks))) else views


def _plan(tensor: TensorPlan, sources: Edges, rows: Tensor, columns: Tensor) -> TensorPlan | None:
    """Return a tensor as rectangles of parameters, or None if it is no such thing.

    Args:
        tensor: Without pieces.
        sources: Ranks.
        rows: Of the parameter, for the tensor's first column ``[rows]``.
        columns: Of the parameter, for the tensor's first row ``[columns]``.
    """
    down, across = sources
    if len(down) == 0 or len(across) == 0 or (len(down.unique()) > 1 and len(across.unique()) > 1):
        return None
    pieces = []
    for top, bottom in pairwise(_borders(down)):
        for left, right in pairwise(_borders(across)):
            blocks, range_ = find_blocks(rows[top:bottom]), find_blocks(columns[left:right])
            if blocks is None or range_ is None or range_.count > 1:
                return None
            source = int(across[left] if top == 0 else down[top])
            pieces.append(Piece(source, blocks, range_.start, range_.size, row=top, column=left))
    return dataclasses.replace(tensor, pieces=tuple(pieces))


def _borders(values: Tensor) -> list[int]:
    """Where runs of equal values [n] start, and n.

    Example:
        ``_borders(torch.tensor([0, 0, 1])) == [0, 2, 3]``
    """
    return [0, *(values.diff().nonzero().flatten() + 1).tolist(), len(values)]


def _find_sources(
    tasks: Sequence[Any], convert: Convert, groups: Groups
) -> list[tuple[TensorPlan, Edges, Tensor, Tensor]]:
    """Send numbers through the conversion; return what `_plan` takes of each tensor; a collective."""
    shapes = _largest_shapes(tasks)
    found = []
    for tensor, edges in _convert_numbers(tasks, convert, groups, shapes):
        (from_down, rows, _), (from_across, _, columns) = (_parts(numbers, shapes[tensor.task]) for numbers in edges)
        found.append((tensor, (from_down, from_across), rows, columns))
    return found


def _largest_shapes(tasks: Sequence[Any]) -> list[tuple[int, int]]:
    """Rows and columns of each task's weight, the most of all ranks that have it."""
    mine = [None if task.param_weight is None else matrix_shape(task.param_weight.shape) for task in tasks]
    of_tasks = zip(*_gather(mine), strict=True)
    known = [[shape for shape in shapes if shape is not None] for shapes in of_tasks]
    return [
        (max((rows for rows, _ in shapes), default=1), max((columns for _, columns in shapes), default=1))
        for shapes in known
    ]


def _convert_numbers(
    tasks: Sequence[Any], convert: Convert, groups: Groups, shapes: Sequence[tuple[int, int]]
) -> list[tuple[TensorPlan, Edges]]:
    """Convert numbers in place of the weights, digit by digit; only weights large enough take part in later ones.

    Args:
        tasks: The conversion tasks.
        convert: The conversion.
        groups: The ranks that number themselves.
        shapes: Of the tasks' weights, the same on all ranks.

    Returns:
        The Hugging Face tensors, without pieces, and the numbers at their edges: see `_parts`.
    """
    counts = [groups[task.mapping.is_expert].size() * prod(shape) for task, shape in zip(tasks, shapes, strict=True)]
    found: dict[tuple[int, int], tuple[TensorPlan, Edges]] = {}  # by task, and number of its tensor
    shape_of = {id(task): shape for task, shape in zip(tasks, shapes, strict=True)}
    place = 1
    while place < max(counts) or place == 1:
        chosen = [number for number, count in enumerate(counts) if place < count or place == 1]

        def digits(task: Any, place: int = place) -> Tensor:
            rank = dist.get_rank(groups[task.mapping.is_expert])
            return _digits(task.param_weight, rank, shape_of[id(task)], place)

        replaced = ReplacedWeights([tasks[number] for number in chosen], digits)
        taken: Counter[int] = Counter()
        for name, tensor in convert(replaced):
            task = chosen[replaced.turn]
            key = task, taken[task]
            taken[task] += 1
            matrix = tensor.reshape(matrix_shape(tensor.shape))
            down, across = matrix[:, :1].flatten().cpu().long(), matrix[:1].flatten().cpu().long()
            is_expert = bool(tasks[task].mapping.is_expert)
            plan = TensorPlan(name, tuple(tensor.shape), tensor.dtype, task, is_expert, ())
            if place == 1:
                found[key] = plan, (down, across)
            elif key in found and found[key][0] == plan:
                lower = found[key][1]
                found[key] = plan, (lower[0] + place * down, lower[1] + place * across)
            else:  # without the other weights the conversion makes something else: no numbers, and so no plan
                found[key] = plan, (down[:0], across[:0])
        place *= _BASE
    return list(found.values())


def _digits(weight: Tensor, rank: int, shape: tuple[int, int], place: int) -> Tensor:
    """Return one digit of the numbers of a weight's elements as a tensor like `weight`.

    They count the elements of matrices of a shape, those of all ranks: (rank · rows + row) · columns + column.
    """
    rows, columns = matrix_shape(weight.shape)
    digits = torch.empty(rows, columns, dtype=weight.dtype, device=weight.device)
    across = torch.arange(columns, device=weight.device)
    at_a_time = max(1, _ELEMENTS // columns)
    for first in range(0, rows, at_a_time):
        part = digits[first : first + at_a_time]
        down = torch.arange(first, first + len(part), device=weight.device)[:, None]
        part.copy_(((rank * shape[0] + down) * shape[1] + across) // place % _BASE)
    return digits.view(weight.shape)


def _parts(numbers: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ranks, rows and columns of numbers that `_digits` made."""
    rows, columns = shape
    return numbers // (rows * columns), numbers // columns % rows, numbers % columns


def _agree(plans: list[TensorPlan], groups: Groups) -> list[TensorPlan]:
    """Return on all ranks of a group the plans of its first: each takes what all have, e.g. norms, from itself."""
    agreed: dict[int, TensorPlan] = {}
    for is_expert, group in enumerate(groups):
        box = [[(number, plan) for number, plan in enumerate(plans) if plan.is_expert == bool(is_expert)]]
        if group.size() > 1:
            dist.broadcast_object_list(box, group=group, group_src=0)
        agreed.update(box[0])
    return [agreed[number] for number in sorted(agreed)]


def _first_misfit(
    tensors: list[TensorPlan], plans: list[TensorPlan], parameters: Sequence[Tensor | None], groups: Groups
) -> str | None:
    """Name the first tensor whose plan is another's, or asks this rank for what it has not."""
    if len(tensors) != len(plans):
        return f"{tensors[0].name} and what comes with it"
    for tensor, plan in zip(tensors, plans, strict=True):
        group, parameter = groups[plan.is_expert], parameters[plan.task]
        if dataclasses.replace(plan, pieces=()) != tensor:
            return tensor.name
        if not all(0 <= piece.source < group.size() for piece in plan.pieces):
            return tensor.name
        mine = [piece for piece in plan.pieces if piece.source == dist.get_rank(group)]
        if mine and (parameter is None or parameter.dtype != plan.dtype or not parameter.is_contiguous()):
            return tensor.name
        if not all(parameter is not None and piece.fits(parameter.shape) for piece in mine):
            return tensor.name
    return None


def _first_difference(views: ShardedViews, exported: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name the first tensor that differs from the export; a collective, through all of them."""
    different: str | None = None
    for (name, view), (exported_name, tensor) in zip(views.weights(), exported, strict=True):
        if different is None and not (name == exported_name and same(view, tensor)):
            different = name
    return different


def _refused(name: str | None) -> bool:
    """Whether any rank names a tensor that cannot be planned; a collective of the world."""
    names = [found for found in _gather(name) if found is not None]
    if names:
        rank_zero_info(
            f"Weights are pushed as Megatron-Bridge converts them, which is slower than by a plan: {names[0]} is not"
            " made of rows and columns of parameters."
        )
    return bool(names)


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
