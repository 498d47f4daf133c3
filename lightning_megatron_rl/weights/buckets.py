"""Buckets of Hugging Face tensors, put together from parameters on several ranks: one broadcast per rank and bucket."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron_rl.weights.copies import Copies
from lightning_megatron_rl.weights.pieces import Groups, Piece, TensorPlan
from lightning_megatron_rl.weights.placement import aligned
from lightning_megatron_rl.weights.rectangles import matrix_shape
from lightning_megatron_rl.weights.source import WeightView, WeightViews

# Of whole tensors. Whoever takes them holds one, or reads it, while the next bucket is filled from one rank's part of
# it after the other.
BUCKET_BYTES = 256 * 2**20


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


class Buckets:
    """All Hugging Face tensors of a split model, laid out in buckets.

    Args:
        plans: What each consists of; the same names, shapes and order on all ranks, the same pieces within a group.
        parameters: This rank's, by number of the conversion task; None is another rank's.
        groups: The ranks that share a model without its experts, and those that share its experts.
        bucket_bytes: Of the tensors that are put together at a time; a larger one is alone.
    """

    def __init__(
        self, plans: Sequence[TensorPlan], parameters: Sequence[Tensor | None], groups: Groups, bucket_bytes: int
    ) -> None:
        self._parameters = parameters
        self._groups = groups
        self.device = next(parameter.device for parameter in parameters if parameter is not None)
        self._buckets = [_fill(held) for held in _split(plans, bucket_bytes)]
        self._memories = _memories(self._buckets, aligned(bucket_bytes))

    def __len__(self) -> int:
        return len(self._buckets)

    def memory(self, *, stays: bool) -> "BucketMemory":
        """Return memory to put the buckets together in, which is taken when it is needed.

        Args:
            stays: Whether it is used in more than one push.
        """
        return BucketMemory(self._sizes(), self._largest_message(), self.device, stays=stays)

    def assembly(self, number: int, into: "BucketMemory | None" = None) -> "Assembly":
        """Prepare to put one bucket together, in memory of its own if none is given."""
        bucket, which = self._buckets[number], self._memories[number]
        memory = _Memory(bucket.num_bytes, self.device, into.bucket(which) if into else None)
        buffer = into.message() if into else None
        # in the same order on all ranks, also where a rank is in two groups
        exchanges = [self._exchange(message, memory, buffer) for message in bucket.messages]
        views = [WeightView(plan.name, memory.tensor(plan, start), plan.shape) for plan, start in bucket.tensors]
        return Assembly(WeightViews(views, stays=into is not None and into.stays, memory=which), exchanges)

    def _exchange(self, message: _Message, bucket: "_Memory", buffer: Tensor | None) -> "_Exchange":
        group = self._groups[message.is_expert]
        mine = []
        if dist.get_rank(group) == message.source:
            for place in message.places:
                parameter = self._parameters[place.plan.task]
                assert parameter is not None, "the plan was checked"
                mine.append(place.piece.of(parameter.detach()))
        wanted = [bucket.rectangle(place) for place in message.places]
        if group.size() == 1:
            return _Exchange(group, message.source, None, None, Copies(wanted, mine))
        memory = _Memory(message.num_bytes, self.device, buffer)
        packed = [memory.part(place) for place in message.places]
        return _Exchange(
            group, message.source, memory.bytes, Copies(packed, mine) if mine else None, Copies(wanted, mine or packed)
        )

    def _sizes(self) -> list[int]:
        """Bytes of each memory that buckets are put together in."""
        sizes = [0] * (max(self._memories, default=0) + 1)
        for bucket, which in zip(self._buckets, self._memories, strict=True):
            sizes[which] = max(sizes[which], bucket.num_bytes)
        return sizes

    def _largest_message(self) -> int:
        messages = (message for bucket in self._buckets for message in bucket.messages)
        sent = (message.num_bytes for message in messages if self._groups[message.is_expert].size() > 1)
        return max(sent, default=0)


@dataclass(frozen=True)
class _Exchange:
    """One message of a bucket, ready to be sent or received."""

    group: dist.ProcessGroup
    source: int
    memory: Tensor | None  # of the message; None: no other rank wants it
    pack: Copies | None  # into it, if it is this rank's
    unpack: Copies  # into the bucket

    def run(self) -> None:
        """Send the message if it is this rank's, receive it if not, and put what it holds where it belongs."""
        if self.pack is not None:
            self.pack.run()
        if self.memory is not None:
            dist.broadcast(self.memory, group=self.group, group_src=self.source)
        self.unpack.run()


@dataclass(frozen=True)
class Assembly:
    """A bucket, ready to be put together."""

    weights: WeightViews
    exchanges: list[_Exchange]

    @torch.no_grad()
    def run(self) -> WeightViews:
        """Put it together; a collective."""
        for exchange in self.exchanges:
            exchange.run()
        return self.weights


class BucketMemory:
    """Memory in which buckets are put together, and what was prepared for it.

    Args:
        sizes: Bytes of each memory for buckets.
        message_bytes: Of the largest message.
        device: Where.
        stays: Whether it is used in more than one push.
    """

    def __init__(self, sizes: Sequence[int], message_bytes: int, device: torch.device, *, stays: bool) -> None:
        self.stays = stays
        self.assemblies: dict[int, Assembly] = {}
        self._sizes = sizes
        self._message_bytes = message_bytes
        self._device = device
        self._buckets: dict[int, Tensor] = {}
        self._message: Tensor | None = None

    def bucket(self, which: int) -> Tensor:
        """Memory for buckets, by its number."""
        if which not in self._buckets:
            self._buckets[which] = self._empty(self._sizes[which])
        return self._buckets[which]

    def message(self) -> Tensor:
        """Memory for messages."""
        if self._message is None:
            self._message = self._empty(self._message_bytes)
        return self._message

    def _empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class _Memory:
    """Bytes that tensors of any dtype lie in.

    Args:
        num_bytes: How many.
        device: Where.
        memory: The first of these, if there are any.
    """

    def __init__(self, num_bytes: int, device: torch.device, memory: Tensor | None = None) -> None:
        if memory is None:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.bytes = memory[:num_bytes]
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


def _memories(buckets: Iterable[_Bucket], capacity: int) -> list[int]:
    """Return the number of the memory for each bucket: another than the one before has, and others for larger ones."""
    numbers: list[int] = []
    for bucket in buckets:
        first = 0 if bucket.num_bytes <= capacity else 2
        numbers.append(first + 1 if numbers[-1:] == [first] else first)
    return numbers


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
