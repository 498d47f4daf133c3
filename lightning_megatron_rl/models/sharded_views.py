"""Hugging Face tensors put together from parameters on several ranks, by a plan: one broadcast per rank and bucket."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron_rl.buffers import aligned
from lightning_megatron_rl.models.export_views import RowBlocks

# Of whole tensors. Whoever takes them holds the last one, and with it its bucket, while the next bucket is filled from
# one rank's part of it after the other.
BUCKET_BYTES = 256 * 2**20


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a tensor: its first dimension, and all others as one; a vector has one column.

    Example:
        ``matrix_shape((6, 2, 4)) == (6, 8)``
    """
    return prod(shape[:1]), prod(shape[1:])


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


@dataclass(frozen=True)
class _Place:
    """A piece on its way: where it lies in its source's message, and its tensor in the bucket."""

    plan: TensorPlan
    piece: Piece
    in_message: int  # bytes
    in_bucket: int  # bytes


@dataclass(frozen=True)
class _Message:
    is_expert: bool
    source: int  # number of the rank in its group
    places: list[_Place]
    num_bytes: int


@dataclass(frozen=True)
class _Bucket:
    tensors: list[tuple[TensorPlan, int]]  # with the byte at which each starts
    messages: list[_Message]
    num_bytes: int


class ShardedViews:
    """All Hugging Face tensors of a model that is split over ranks.

    Args:
        plans: What each consists of; the same names, shapes and order on all ranks, the same pieces within a group.
        parameters: This rank's, by number of the conversion task; None is another rank's.
        groups: The ranks that share a model without its experts, and those that share its experts.
        bucket_bytes: Of the tensors that are put together at a time; a larger one is alone.
    """

    def __init__(
        self,
        plans: Sequence[TensorPlan],
        parameters: Sequence[Tensor | None],
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._parameters = parameters
        self._groups = groups
        self._device = next(parameter.device for parameter in parameters if parameter is not None)
        self._buckets = [_fill(held) for held in _split(plans, bucket_bytes)]

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and whole tensors in the parameters' dtype; a collective: all ranks iterate to the end.

        No memory is written twice: a tensor stays as it is for as long as somebody holds it, and so does the bucket
        that it is part of.
        """
        for bucket in self._buckets:
            yield from self._assemble(bucket)

    def _assemble(self, bucket: _Bucket) -> list[tuple[str, Tensor]]:
        memory = _Memory(bucket.num_bytes, self._device)
        for message in bucket.messages:  # in the same order on all ranks, also where a rank is in two groups
            copy_all([memory.rectangle(place) for place in message.places], self._exchange(message))
        return [(plan.name, memory.tensor(plan, start)) for plan, start in bucket.tensors]

    def _exchange(self, message: _Message) -> list[Tensor]:
        """Send what a message holds if it is this rank's, receive it if not, and return it."""
        group = self._groups[message.is_expert]
        mine = []
        if dist.get_rank(group) == message.source:
            for place in message.places:
                parameter = self._parameters[place.plan.task]
                assert parameter is not None, "the plan was checked"
                mine.append(place.piece.of(parameter))
        if group.size() == 1:
            return mine
        memory = _Memory(message.num_bytes, self._device)
        packed = [memory.part(place) for place in message.places]
        if mine:
            copy_all(packed, mine)
        dist.broadcast(memory.bytes, group=group, group_src=message.source)
        return mine or packed


class _Memory:
    """Bytes that tensors of any dtype lie in."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._typed: dict[torch.dtype, Tensor] = {}

    def tensor(self, plan: TensorPlan, start: int) -> Tensor:
        """A whole tensor that starts at a byte."""
        number = start // plan.dtype.itemsize
        return self._as(plan.dtype)[number : number + prod(plan.shape)].view(plan.shape)

    def rectangle(self, place: _Place) -> Tensor:
        """A piece where it belongs in its tensor."""
        plan, piece = place.plan, place.piece
        columns = matrix_shape(plan.shape)[1]
        start = place.in_bucket // plan.dtype.itemsize + piece.row * columns + piece.column
        return self._as(plan.dtype).as_strided(piece.shape, (piece.rows.size * columns, columns, 1), start)

    def part(self, place: _Place) -> Tensor:
        """A piece in its message, without gaps."""
        shape, dtype = place.piece.shape, place.plan.dtype
        return self._as(dtype).as_strided(shape, (shape[1] * shape[2], shape[2], 1), place.in_message // dtype.itemsize)

    def _as(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._typed:
            self._typed[dtype] = self.bytes.view(dtype)
        return self._typed[dtype]


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors in as few kernels as there can be: one for all of a dtype that are laid out as their targets."""
    kinds: dict[tuple[torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        into, out_of = kinds.setdefault((target.dtype, target.stride() == source.stride()), ([], []))
        into.append(target)
        out_of.append(source)
    for into, out_of in kinds.values():
        torch._foreach_copy_(into, out_of)


def _split(plans: Sequence[TensorPlan], capacity: int) -> Iterator[list[TensorPlan]]:
    held: list[TensorPlan] = []
    end = 0
    for plan in plans:
        if held and end + plan.num_bytes > capacity:
            yield held
            held, end = [], 0
        held.append(plan)
        end += aligned(plan.num_bytes)
    if held:
        yield held


def _fill(plans: list[TensorPlan]) -> _Bucket:
    """Lay tensors out in a bucket, and their pieces in a message of each source."""
    tensors, end = [], 0
    messages: dict[tuple[bool, int], _Message] = {}
    for plan in plans:
        tensors.append((plan, end))
        for piece in plan.pieces:
            key = plan.is_expert, piece.source
            message = messages.get(key, _Message(*key, [], 0))
            message.places.append(_Place(plan, piece, message.num_bytes, end))
            size = aligned(prod(piece.shape) * plan.dtype.itemsize)
            messages[key] = _Message(*key, message.places, message.num_bytes + size)
        end += aligned(plan.num_bytes)
    return _Bucket(tensors, [messages[key] for key in sorted(messages)], end)
