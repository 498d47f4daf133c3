"""Finds, through Megatron-Bridge, which rank's parameter each part of a Hugging Face tensor comes from.

Every rank lets Megatron-Bridge convert numbers in place of its weights, which say of each element whose it is, and in
which row and column. They go as digits, the bits of numbers in the weights' own dtype, so that planning holds and sends
no more than a few exports do. A weight is split along its rows or its columns, so the first column and the first row of
a converted tensor tell all; what is otherwise, or more than moving, shows when the weights themselves are compared with
an export.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron_rl.weights.buckets import BUCKET_BYTES
from lightning_megatron_rl.weights.export_views import Convert, ReplacedWeights, find_blocks, same
from lightning_megatron_rl.weights.messages import HeldTensor
from lightning_megatron_rl.weights.pieces import Groups, Piece, TensorPlan
from lightning_megatron_rl.weights.rectangles import matrix_shape
from lightning_megatron_rl.weights.sharded_views import ShardedViews

Edges = tuple[bytes, ...]
"""Digits of a converted tensor, as a matrix, the lowest first: of its first column [rows], then of its first row
[columns]. The same for tensors that are alike, as those of a rank's experts are: each is looked at once."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number
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
    shapes, dtypes = _largest_shapes(tasks)
    base = _base(dtypes)
    find_pieces = cache(partial(_find_pieces, base=base))
    tensors, plans = [], []
    for tensor, edges in _convert_numbers(tasks, convert, groups, shapes, base):
        pieces = find_pieces(edges, tensor.dtype, matrix_shape(tensor.shape), shapes[tensor.task])
        tensors.append(tensor)
        plans.append(None if pieces is None else dataclasses.replace(tensor, pieces=pieces))
    if _refused(next((tensor.name for tensor, plan in zip(tensors, plans, strict=True) if plan is None), None)):
        return None
    mine = [plan for plan in plans if plan is not None]
    agreed = _agree(mine, groups)
    misfit = _first_misfit(tensors, agreed, parameters, groups) or _first_misfit(tensors, mine, parameters, groups)
    if _refused(misfit):
        return None
    held = [[piece for piece in plan.pieces if piece.source == dist.get_rank(groups[plan.is_expert])] for plan in mine]
    views = ShardedViews(agreed, parameters, groups, held, bucket_bytes)
    return None if _refused(_first_difference(views, convert(tasks))) else views


def _find_pieces(
    edges: Edges, dtype: torch.dtype, matrix: tuple[int, int], shape: tuple[int, int], base: int
) -> tuple[Piece, ...] | None:
    """Return a tensor as rectangles of parameters, or None if it does not consist of rectangles.

    Args:
        edges: Its digits; nothing if the tensor is not what it was.
        dtype: Of the tensor.
        matrix: Its rows and columns.
        shape: Rows and columns of the parameters.
        base: Of the digits.
    """
    if not edges or 0 in matrix:
        return None
    numbers = torch.zeros(sum(matrix), dtype=torch.long)
    for digits in reversed(edges):
        numbers = numbers * base + torch.frombuffer(bytearray(digits), dtype=_BITS[dtype.itemsize])
    sources, rows, columns = _parts(numbers, shape)
    down, across = sources.split(matrix)
    rows, columns = rows[: len(down)], columns[len(down) :]
    if len(down.unique()) > 1 and len(across.unique()) > 1:
        return None
    pieces = []
    for top, bottom in pairwise(_borders(down)):
        for left, right in pairwise(_borders(across)):
            blocks, range_ = find_blocks(rows[top:bottom]), find_blocks(columns[left:right])
            if blocks is None or range_ is None or range_.count > 1:
                return None
            source = int(across[left] if top == 0 else down[top])
            pieces.append(Piece(source, blocks, range_.start, range_.size, row=top, column=left))
    return tuple(pieces)


def _borders(values: Tensor) -> list[int]:
    """Where runs of equal values [n] start, and n."""
    return [0, *(values.diff().nonzero().flatten() + 1).tolist(), len(values)]


def _largest_shapes(tasks: Sequence[Any]) -> tuple[list[tuple[int, int]], set[torch.dtype]]:
    """Rows and columns of each task's weight, the most of all ranks that have it; and all dtypes of weights."""
    weights = [task.param_weight for task in tasks]
    mine = [None if weight is None else (matrix_shape(weight.shape), weight.dtype) for weight in weights]
    shapes, dtypes = [], set()
    for of_ranks in zip(*_gather(mine), strict=True):
        known = [found for found in of_ranks if found is not None]
        rows = max((shape[0] for shape, _ in known), default=1)
        columns = max((shape[1] for shape, _ in known), default=1)
        shapes.append((rows, columns))
        dtypes |= {dtype for _, dtype in known}
    return shapes, dtypes


def _base(dtypes: Iterable[torch.dtype]) -> int:
    """How many digits there are in all of these dtypes: the bits of their finite numbers that are not negative."""
    largest = [
        _bits(torch.tensor(torch.finfo(dtype).max, dtype=dtype)).item()
        if dtype.is_floating_point
        else torch.iinfo(_BITS[dtype.itemsize]).max
        for dtype in dtypes
    ]
    return int(min(largest, default=1)) + 1


def _bits(numbers: Tensor) -> Tensor:
    """Return the bits of numbers as integers, in the same memory."""
    return numbers.view(_BITS[numbers.dtype.itemsize])


def _convert_numbers(
    tasks: Sequence[Any], convert: Convert, groups: Groups, shapes: Sequence[tuple[int, int]], base: int
) -> list[tuple[TensorPlan, Edges]]:
    """Convert numbers in place of the weights, digit by digit; only weights large enough take part in later ones.

    Args:
        tasks: The conversion tasks.
        convert: The conversion.
        groups: The ranks that number themselves.
        shapes: Of the tasks' weights, the same on all ranks.
        base: Of the digits.

    Returns:
        The Hugging Face tensors, without pieces, and the digits at their edges.
    """
    counts = [groups[task.mapping.is_expert].size() * prod(shape) for task, shape in zip(tasks, shapes, strict=True)]
    found: dict[tuple[int, int], tuple[TensorPlan, Edges]] = {}  # by task, and number of its tensor
    known: dict[bytes, bytes] = {}  # each once
    shape_of = {id(task): shape for task, shape in zip(tasks, shapes, strict=True)}
    place = 1
    while place < max(counts) or place == 1:
        chosen = [number for number, count in enumerate(counts) if place < count or place == 1]
        make_digits = _DigitTensors(place, base)

        def digits(task: Any, make_digits: _DigitTensors = make_digits) -> Tensor:
            rank = dist.get_rank(groups[task.mapping.is_expert])
            return make_digits.like(task.param_weight, rank, shape_of[id(task)])

        replaced = ReplacedWeights([tasks[number] for number in chosen], digits)
        taken: Counter[int] = Counter()
        for name, tensor in convert(replaced):
            task = chosen[replaced.turn]
            key = task, taken[task]
            taken[task] += 1
            edges = _edges(tensor)
            edges = known.setdefault(edges, edges)
            plan = TensorPlan(name, tuple(tensor.shape), tensor.dtype, task, bool(tasks[task].mapping.is_expert), ())
            if place == 1:
                found[key] = plan, (edges,)
            elif key in found and found[key][0] == plan:
                found[key] = plan, (*found[key][1], edges)
            else:  # without the other weights the conversion makes something else: no numbers, and so no plan
                found[key] = plan, ()
        place *= base
    return list(found.values())


def _edges(tensor: Tensor) -> bytes:
    """Return the bits of a tensor's first column, as a matrix, and those of its first row."""
    matrix = tensor.reshape(matrix_shape(tensor.shape))
    numbers = torch.cat([matrix[:, :1].flatten(), matrix[:1].flatten()])
    return _bits(numbers).cpu().numpy().tobytes()


class _DigitTensors:
    """Tensors of one digit of the numbers of weights' elements; the last two are kept, for those of the next expert.

    Args:
        place: Of the digit: a power of the base.
        base: Of the digits.
    """

    def __init__(self, place: int, base: int) -> None:
        self._place = place
        self._base = base
        self._kept: dict[Any, Tensor] = {}

    def like(self, weight: Tensor, rank: int, shape: tuple[int, int]) -> Tensor:
        """Return a tensor like `weight`, which is not written to.

        Its numbers count the elements of matrices of a shape, those of all ranks: (rank · rows + row) · columns +
        column.
        """
        key = weight.shape, weight.dtype, weight.device, rank, shape
        if key not in self._kept:
            if len(self._kept) == 2:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = self._make(weight, rank, shape)
        return self._kept[key]

    def _make(self, weight: Tensor, rank: int, shape: tuple[int, int]) -> Tensor:
        rows, columns = matrix_shape(weight.shape)
        digits = torch.empty(rows, columns, dtype=weight.dtype, device=weight.device)
        across = torch.arange(columns, device=weight.device)
        at_a_time = max(1, _ELEMENTS // columns)
        for first in range(0, rows, at_a_time):
            part = _bits(digits[first : first + at_a_time])
            down = torch.arange(first, first + len(part), device=weight.device)[:, None]
            part.copy_(((rank * shape[0] + down) * shape[1] + across) // self._place % self._base)
        return digits.view(weight.shape)


def _parts(numbers: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ranks, rows and columns of numbers that `_DigitTensors` made."""
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
    held = views.held()
    for (name, view), (exported_name, tensor) in zip(views.weights().tensors(), exported, strict=True):
        if different is None and not (name == exported_name and same(view, tensor) and _holds(held.get(name), tensor)):
            different = name
    return different


def _holds(held: HeldTensor | None, tensor: Tensor) -> bool:
    """Whether what this rank has of a tensor are parts of it, also where the plan takes them from another rank."""
    if held is None:
        return True
    matrix = tensor.reshape(matrix_shape(tensor.shape))
    return all(same(part.view.flatten(0, 1), part.rectangle.of(matrix)) for part in held.parts)


def _refused(name: str | None) -> bool:
    """Whether any rank names a tensor that cannot be planned; a collective of the world."""
    names = [found for found in _gather(name) if found is not None]
    if names:
        from lightning.pytorch.utilities.rank_zero import rank_zero_info  # slow for those who push nothing

        rank_zero_info(
            f"Weights are pushed as Megatron-Bridge converts them, which is slower than by a plan: {names[0]} is not"
            " made of rows and columns of parameters."
        )
    return bool(names)


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
