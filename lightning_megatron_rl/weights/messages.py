"""Which rank sends which rectangle of which tensor to which worker: planned from what ranks hold and workers read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_megatron_rl.weights.reads import Read, Reads, dtype_of
from lightning_megatron_rl.weights.rectangles import Rectangle, matrix_shape


@dataclass(frozen=True)
class Holding:
    """What a rank has of one tensor."""

    shape: tuple[int, ...]  # of the tensor
    dtype: torch.dtype
    parts: tuple[Rectangle, ...]  # of it as a matrix


Holdings = dict[str, Holding]
"""What a rank has, by the tensors' names."""


@dataclass(frozen=True)
class Part:
    """A rectangle of a tensor in a message, row by row without gaps."""

    name: str
    dtype: torch.dtype
    rectangle: Rectangle
    offset: int  # bytes from the start of the message

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + self.rectangle.size * self.dtype.itemsize

    def of(self, message: Tensor) -> Tensor:
        """Return its place in a message: a view ``[rows, columns]``."""
        flat = message[self.offset : self.end].view(self.dtype)
        return flat.view(self.rectangle.rows, self.rectangle.columns)


@dataclass(frozen=True)
class Message:
    """What one rank sends one worker at a time."""

    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return self.parts[-1].end

    def to_plain(self) -> list[Any]:
        """Return it as JSON has it."""
        return [[part.name, str(part.dtype).removeprefix("torch."), *part.rectangle.to_plain()] for part in self.parts]

    @classmethod
    def from_plain(cls, plain: Iterable[Any], shapes: Mapping[str, Sequence[int]]) -> "Message":
        """Return what `to_plain` was given.

        Args:
            plain: As JSON has it.
            shapes: Of the tensors.

        Raises:
            KeyError: A tensor has no shape.
            ValueError: A dtype is none of torch's, or a part is none of its tensor's.
        """
        return cls(
            tuple(_lay_out((name, dtype_of(dtype), Rectangle.from_plain(r, shapes[name])) for name, dtype, *r in plain))
        )


Messages = list[Message]
"""What one rank sends one worker in an update, in this order."""


def _lay_out(parts: Iterable[tuple[str, torch.dtype, Rectangle]]) -> Iterator[Part]:
    end = 0
    for name, dtype, rectangle in parts:
        part = Part(name, dtype, rectangle, -(-end // dtype.itemsize) * dtype.itemsize)
        yield part
        end = part.end


def can_send(held: Sequence[Holdings], reads: Reads) -> bool:
    """Whether ranks have tensors of these names, shapes and dtypes."""
    kinds: dict[str, set[tuple[tuple[int, ...], torch.dtype]]] = {}
    for holdings in held:
        for name, holding in holdings.items():
            kinds.setdefault(name, set()).add((holding.shape, holding.dtype))
    return all(kinds.get(name) == {(read.shape, read.dtype)} for name, read in reads.items())


def plan_messages(held: Sequence[Holdings], reads: Sequence[Reads], limit: int) -> list[list[Messages]] | None:
    """Plan who sends what: each worker gets each element that it reads once, from a rank that has it.

    What several ranks have is shared out between them: a part goes to the one that has least to send so far.

    Args:
        held: What each rank has.
        reads: What each worker reads.
        limit: Longest message. # bytes

    Returns:
        Messages by rank and worker; None: the ranks do not have all of it.
    """
    if not all(can_send(held, of_worker) for of_worker in reads):
        return None
    holders = _holders(held)
    loads = [0] * len(held)
    chosen: list[list[list[tuple[str, torch.dtype, Rectangle]]]] = [[[] for _ in reads] for _ in held]
    for worker, of_worker in enumerate(reads):
        for name, read in of_worker.items():
            size = read.dtype.itemsize
            for part, ranks in _split(read, holders[name]):
                if not ranks:
                    return None
                for piece in part.pieces(max(1, limit // size)):
                    rank = min(ranks, key=lambda one: loads[one])
                    loads[rank] += piece.size * size
                    chosen[rank][worker].append((name, read.dtype, piece))
    return [[list(_pack(parts, limit)) for parts in of_rank] for of_rank in chosen]


def _holders(held: Sequence[Holdings]) -> dict[str, list[tuple[Rectangle, list[int]]]]:
    """The parts of each tensor, and the ranks that have each."""
    found: dict[str, dict[Rectangle, list[int]]] = {}
    for rank, holdings in enumerate(held):
        for name, holding in holdings.items():
            parts = found.setdefault(name, {})
            for part in holding.parts:
                parts.setdefault(part, []).append(rank)
    return {name: list(parts.items()) for name, parts in found.items()}


def _split(read: Read, holders: list[tuple[Rectangle, list[int]]]) -> Iterator[tuple[Rectangle, list[int]]]:
    """Yield what is read in parts that do not overlap, and who has each: nobody, if what is left is missing."""
    left = list(read.parts)
    for held, ranks in holders:
        rest = []
        for part in left:
            common = part.common(held)
            if common is not None:
                yield common, ranks
            rest += part.without(held)
        left = rest
    yield from ((part, []) for part in left)


def _pack(parts: Iterable[tuple[str, torch.dtype, Rectangle]], limit: int) -> Iterator[Message]:
    """Yield parts in messages of at most `limit` bytes; a part that is longer is alone."""
    waiting: list[tuple[str, torch.dtype, Rectangle]] = []
    end = 0
    for part in parts:
        size = part[1].itemsize
        begin = -(-end // size) * size
        end = begin + part[2].size * size
        if waiting and end > limit:
            yield Message(tuple(_lay_out(waiting)))
            waiting, end = [], part[2].size * size
        waiting.append(part)
    if waiting:
        yield Message(tuple(_lay_out(waiting)))


@dataclass(frozen=True)
class HeldPart:
    """A rectangle of a tensor in this rank's memory."""

    rectangle: Rectangle
    view: Tensor  # its rows as they lie: [blocks, rows of a block, columns]

    def cut(self, rectangle: Rectangle) -> Iterator[tuple[int, Tensor]]:
        """Yield a part of it, block by block: its first row within the part, and a view ``[rows, columns]``."""
        size = self.view.shape[1]
        first, column = rectangle.row - self.rectangle.row, rectangle.column - self.rectangle.column
        last = first + rectangle.rows
        for block in range(first // size, -(-last // size)):
            begin, end = max(first, block * size), min(last, (block + 1) * size)
            rows = self.view[block].narrow(0, begin - block * size, end - begin)
            yield begin - first, rows.narrow(1, column, rectangle.columns)


@dataclass(frozen=True)
class HeldTensor:
    """What this rank has of one tensor, and where."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[HeldPart, ...]

    @property
    def holding(self) -> Holding:
        """What others need to know of it."""
        return Holding(self.shape, self.dtype, tuple(part.rectangle for part in self.parts))


def packing_views(message: Message, held: Mapping[str, HeldTensor], into: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the copies that pack a message: views of where it is packed, and of this rank's memory.

    Args:
        message: What to send.
        held: What this rank has.
        into: ``[bytes]`` uint8, at least the message's, which is its first bytes then.

    Returns:
        Targets and sources, pairs of one shape.
    """
    targets, sources = [], []
    for part in message.parts:
        target = part.of(into)
        owner = next(one for one in held[part.name].parts if one.rectangle.common(part.rectangle) == part.rectangle)
        for row, rows in owner.cut(part.rectangle):
            targets.append(target.narrow(0, row, len(rows)))
            sources.append(rows)
    return targets, sources


@torch.no_grad()
def read_message(message: Message, packed: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Copy a message's parts where they belong in whole tensors, which are contiguous."""
    for part in message.parts:
        tensor = tensors[part.name]
        part.rectangle.of(tensor.view(matrix_shape(tensor.shape))).copy_(part.of(packed))


def empty_tensors(reads: Reads, *, nan: bool = False) -> dict[str, Tensor]:
    """Return whole tensors to put parts into, on the CPU, where memory that is not written to is not taken.

    Args:
        reads: Of the tensors.
        nan: Whether to write NaN to all of it: bytes of ones.
    """
    found = {name: torch.empty(prod(read.shape), dtype=read.dtype) for name, read in reads.items()}
    if nan:
        for tensor in found.values():
            tensor.view(torch.uint8).fill_(255)
    return {name: tensor.view(reads[name].shape) for name, tensor in found.items()}
