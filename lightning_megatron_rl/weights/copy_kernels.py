"""Many copies on one GPU by one kernel: launching an operation for each takes longer than the copies."""

from collections.abc import Sequence
from itertools import product
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_megatron_rl.weights.placement import merge_dimensions

WORD_BYTES = 8  # what the kernel reads at once
_TILE_WORDS = 8192  # of one program
_WORDS_AT_ONCE = 2048
_PIECE_WORDS = 2**31 - 2 * _TILE_WORDS  # offsets in a piece have 32 bits
_MAX_PIECES = 1024  # of one tensor

Piece = tuple[int, int, int, int, int, int]  # a column of `pieces` below


@triton.jit
def _copy(
    pieces,  # int64 [count, 6]: addresses of source and target; words per row, words; words from row to row of both
    tiles,  # int32 [programs, 2]: number of the piece, and of the tile in it
    tile_words: tl.constexpr,
    block: tl.constexpr,
):
    tile = tiles + 2 * tl.program_id(0)
    piece = pieces + 6 * tl.load(tile).to(tl.int64)
    first = tl.load(tile + 1) * tile_words
    source = tl.load(piece).to(tl.pointer_type(tl.int64))
    target = tl.load(piece + 1).to(tl.pointer_type(tl.int64))
    width = tl.load(piece + 2).to(tl.int32)
    words = tl.load(piece + 3).to(tl.int32)
    source_step = tl.load(piece + 4)
    target_step = tl.load(piece + 5)
    for start in range(0, tile_words, block):
        word = first + start + tl.arange(0, block)
        inside = word < words
        if width == words:  # one row: nothing to divide
            tl.store(target + word, tl.load(source + word, mask=inside), mask=inside)
        else:
            row = word // width
            column = word - row * width
            value = tl.load(source + row * source_step + column, mask=inside)
            tl.store(target + row * target_step + column, value, mask=inside)


class CopyTable:
    """Copies whose memory stays where it is, as a table that one kernel goes through.

    Args:
        pieces: Of `pieces_of`; all on `device`.
        device: Theirs.
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        table = torch.tensor(pieces, dtype=torch.int64).view(-1, 6)
        counts = (table[:, 3] + _TILE_WORDS - 1) // _TILE_WORDS
        numbers = torch.repeat_interleave(torch.arange(len(pieces)), counts)
        firsts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        tiles = torch.stack([numbers, torch.arange(len(numbers)) - firsts], dim=1)
        self._pieces, self._tiles = table.to(device), tiles.to(torch.int32).to(device)

    def run(self) -> None:
        """Copy, in the order of the device's current stream."""
        if not len(self._tiles):
            return
        with torch.cuda.device_of(self._tiles):
            _copy[(len(self._tiles),)](
                self._pieces, self._tiles, tile_words=_TILE_WORDS, block=_WORDS_AT_ONCE, num_warps=4
            )


def warm_up(device: torch.device) -> None:
    """Compile the kernel for a device, before whoever watches for kernels that are compiled late."""
    words = torch.zeros(2, dtype=torch.int64, device=device)
    CopyTable([(words.data_ptr(), words.data_ptr() + WORD_BYTES, 1, 1, 0, 0)], device).run()


def pieces_of(target: Tensor, source: Tensor) -> list[Piece] | None:
    """Return the copy of one tensor as blocks of rows; None if it does not consist of whole words.

    Args:
        target: Any shape and strides.
        source: The same shape, dtype and device.
    """
    if not target.numel():
        return []
    item = target.element_size()
    dimensions = merge_dimensions(target.shape, target.stride(), source.stride())
    if dimensions and dimensions[-1][1:] != (1, 1):
        return None  # elements lie apart
    (width, _, _) = dimensions.pop() if dimensions else (target.numel(), 1, 1)
    (rows, target_step, source_step) = dimensions.pop() if dimensions else (1, 0, 0)
    in_words = [width * item, target_step * item, source_step * item, target.data_ptr(), source.data_ptr()]
    in_words += [step * item for _, *steps in dimensions for step in steps]
    count = prod(size for size, _, _ in dimensions)
    if any(number % WORD_BYTES for number in in_words) or count > _MAX_PIECES:
        return None
    if rows * width * item > _PIECE_WORDS * WORD_BYTES:
        return None
    found = []
    for index in product(*(range(size) for size, _, _ in dimensions)):
        into = sum(number * step for number, (_, step, _) in zip(index, dimensions, strict=True))
        out_of = sum(number * step for number, (_, _, step) in zip(index, dimensions, strict=True))
        addresses = (source.data_ptr() + out_of * item, target.data_ptr() + into * item)
        per_row, words = width * item // WORD_BYTES, rows * width * item // WORD_BYTES
        found.append((*addresses, per_row, words, source_step * item // WORD_BYTES, target_step * item // WORD_BYTES))
    return found
