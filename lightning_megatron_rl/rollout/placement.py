"""Where named tensors lie in memory that another process can map: plain data, and buckets of a bounded size."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; more than any dtype needs, and one cache line


@dataclass(frozen=True)
class Placement:
    """One named tensor as a strided view of a numbered block of bytes.

    Example:
        ``Placement("a", 0, torch.bfloat16, (2, 3), (3, 1), offset=64).view(blocks)``
    """

    name: str
    block: int  # which of the blocks
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    offset: int  # bytes from the start of the block

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def view(self, blocks: Sequence[Tensor]) -> Tensor:
        """The tensor itself, without a copy; blocks are ``[bytes]`` uint8."""
        flat = blocks[self.block][self.offset :]
        usable = flat[: flat.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return usable.as_strided(self.shape, self.stride, usable.storage_offset())


def place(tensors: Iterable[tuple[str, Tensor]]) -> tuple[list[Tensor], list[Placement]]:
    """Describe tensors where they are: the storages they lie in, as ``[bytes]`` uint8, and their places there.

    Example:
        Two slices of one buffer give one block and two placements.
    """
    blocks: list[Tensor] = []
    numbers: dict[int, int] = {}
    placements = []
    for name, tensor in tensors:
        storage = tensor.untyped_storage()
        number = numbers.setdefault(storage.data_ptr(), len(blocks))
        if number == len(blocks):
            blocks.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))  # type: ignore[call-overload]
        offset = tensor.storage_offset() * tensor.itemsize
        placements.append(Placement(name, number, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset))
    return blocks, placements


def fill_buckets(tensors: Iterable[tuple[str, Tensor]], capacity: int) -> Iterator[tuple[Tensor, list[Placement]]]:
    """Copy tensors end to end into one buffer and yield it, with what it holds, whenever it is full and at the end.

    The same buffer is filled again after each yield, so whoever reads it must be done by then; a tensor larger than
    `capacity` gets a buffer of its own size.

    Args:
        tensors: Names and tensors of one device, taken one by one.
        capacity: Bytes of the buffer.

    Raises:
        ValueError: `capacity` is no positive number of bytes.

    Example:
        Tensors of 40, 40 and 40 bytes with ``capacity=128``: 40 at 0 and 40 at 64, then 40 at 0.
    """
    if capacity < 1:
        raise ValueError(f"a bucket of {capacity} bytes: give a positive size")
    buffer: Tensor | None = None
    held: list[Placement] = []
    end = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.itemsize
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if held and offset + size > capacity:
            assert buffer is not None
            yield buffer, held
            held, offset = [], 0
        if buffer is None or offset + size > buffer.numel():
            buffer = None  # its memory is free before the larger one is taken
            buffer = torch.empty(max(capacity, size), dtype=torch.uint8, device=tensor.device)
        stride = tuple(int(step) for step in torch.empty(tensor.shape, device="meta").stride())
        placement = Placement(name, 0, tensor.dtype, tuple(tensor.shape), stride, offset)
        placement.view([buffer]).copy_(tensor.detach())
        held.append(placement)
        end = offset + size
    if held:
        assert buffer is not None
        yield buffer, held
