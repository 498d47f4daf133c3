"""Where named tensors lie in memory that another process can map: plain data, and buckets of a bounded size."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lightning_megatron_rl.weights.cuda_memory import whole_storage
from lightning_megatron_rl.weights.source import WeightView, WeightViews

ALIGNMENT = 64  # bytes; more than any dtype needs, and one cache line


def aligned(num_bytes: int) -> int:
    """Return the first place at or after `num_bytes` where a tensor may begin in a buffer that holds several."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Placement:
    """One named tensor as a strided view of a numbered block of bytes."""

    name: str
    block: int  # which of the blocks
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    offset: int  # bytes from the start of the block
    tensor_shape: tuple[int, ...] | None = None  # if the view's rows lie in blocks apart: of the tensor they are

    @classmethod
    def packed(cls, name: str, tensor: Tensor, offset: int) -> "Placement":
        """Return a place without gaps, in the only block, for what `tensor` holds."""
        stride = tuple(int(step) for step in torch.empty(tensor.shape, device="meta").stride())
        return cls(name, 0, tensor.dtype, tuple(tensor.shape), stride, offset)

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """The first byte after a tensor without gaps."""
        return self.offset + self.num_bytes

    def view(self, blocks: Sequence[Tensor]) -> Tensor:
        """The tensor itself, without a copy, or its rows as they lie; blocks are ``[bytes]`` uint8."""
        return view_all([self], blocks)[0]

    def tensor(self, blocks: Sequence[Tensor]) -> Tensor:
        """The tensor; a copy if its rows lie apart."""
        view = self.view(blocks)
        return view if self.tensor_shape is None else view.reshape(self.tensor_shape)


def view_all(placements: Iterable[Placement], blocks: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors themselves, without a copy: one operation for each, of which a sync has hundreds.

    Args:
        placements: Their offsets are multiples of their elements' size.
        blocks: ``[bytes]`` uint8; where one begins within its memory is a multiple of those sizes as well.
    """
    typed: dict[tuple[int, torch.dtype], Tensor] = {}
    views = []
    for place in placements:
        size = place.dtype.itemsize
        block = typed.get((place.block, place.dtype))
        if block is None:
            flat = blocks[place.block]
            block = typed[place.block, place.dtype] = flat[: flat.numel() // size * size].view(place.dtype)
        views.append(block.as_strided(place.shape, place.stride, block.storage_offset() + place.offset // size))
    return views


def merge_dimensions(shape: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """Return size and steps of as few dimensions as there can be; none of one element.

    Args:
        shape: Sizes of the dimensions.
        strides: Of one tensor or of several, each of which must lie so that dimensions can be taken as one.

    Example:
        ``merge_dimensions((2, 1, 3), (3, 9, 1)) == [(6, 1)]``
    """
    merged: list[tuple[int, ...]] = []
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1:] == tuple(size * step for step in steps):
            size *= merged.pop()[0]
        merged.append((size, *steps))
    return merged


def place(weights: Iterable[WeightView]) -> tuple[list[Tensor], list[Placement]]:
    """Describe weights where they are: the storages they lie in, as ``[bytes]`` uint8, and their places there."""
    blocks: list[Tensor] = []
    numbers: dict[int, int] = {}
    placements = []
    for weight in weights:
        view = weight.view
        storage = view.untyped_storage()
        number = numbers.setdefault(storage.data_ptr(), len(blocks))
        if number == len(blocks):
            blocks.append(whole_storage(view))
        offset = int(view.storage_offset()) * view.itemsize
        stride = tuple(int(step) for step in view.stride())
        shape = tuple(view.shape)
        apart = None if shape == weight.shape else weight.shape
        placements.append(Placement(weight.name, number, view.dtype, shape, stride, offset, apart))
    return blocks, placements


class PlacedWeights:
    """Where the weights of an update lie, found once for as long as they stay there."""

    def __init__(self) -> None:
        self.placements: list[Placement] = []
        self.num_bytes = 0
        self._last: weakref.ref[WeightViews] | None = None
        self._key: list[tuple[object, ...]] = []
        self._firsts: list[int] = []  # of each block: a weight in it
        self.spans: list[tuple[int, int]] = []  # of each block: where it starts, and its bytes

    def place(self, weights: WeightViews) -> tuple[list[Tensor], bool]:
        """Return the blocks as `place` does, and whether everything lies as the last time."""
        views = weights.views
        is_last = self._last is not None and self._last() is weights  # then at most their memory has moved
        self._last = weakref.ref(weights)
        if is_last or [_key(view) for view in views] == self._key:
            blocks = [whole_storage(views[first].view) for first in self._firsts]
            if _spans(blocks) == self.spans:  # offsets count from the start of a block
                return blocks, True
        blocks, self.placements = place(views)
        self._key, self.spans = [_key(view) for view in views], _spans(blocks)
        self.num_bytes = sum(found.num_bytes for found in self.placements)
        numbers = [found.block for found in self.placements]
        self._firsts = [numbers.index(number) for number in range(len(blocks))]
        return blocks, False


def _key(weight: WeightView) -> tuple[object, ...]:
    view = weight.view
    return weight.name, weight.shape, view.data_ptr(), view.dtype, view.shape, view.stride()


def _spans(blocks: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(block.data_ptr(), block.numel()) for block in blocks]


def fill_buckets(tensors: Iterable[tuple[str, Tensor]], capacity: int) -> Iterator[tuple[Tensor, list[Placement]]]:
    """Copy tensors end to end into one buffer and yield it, with what it holds, whenever it is full and at the end.

    The same buffer is filled again after each yield, so it must have been read by then; a tensor larger than `capacity`
    gets a buffer of its own size.

    Args:
        tensors: Names and tensors of one device, taken one by one.
        capacity: Bytes of the buffer.

    Raises:
        ValueError: `capacity` is below 1.
    """
    if capacity < 1:
        raise ValueError(f"a bucket of {capacity} bytes: give a positive size")
    buffer: Tensor | None = None
    held: list[Placement] = []
    end = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.itemsize
        offset = aligned(end)
        if held and offset + size > capacity:
            assert buffer is not None
            yield buffer, held
            held, offset = [], 0
        if buffer is None or offset + size > buffer.numel():
            buffer = None  # its memory is free before the larger one is taken
            buffer = torch.empty(max(capacity, size), dtype=torch.uint8, device=tensor.device)
        placement = Placement.packed(name, tensor, offset)
        placement.view([buffer]).copy_(tensor.detach())
        held.append(placement)
        end = offset + size
    if held:
        assert buffer is not None
        yield buffer, held
