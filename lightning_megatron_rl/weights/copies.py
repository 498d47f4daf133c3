"""Many copies between pairs of tensors, prepared once."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_megatron_rl.compat.torch_names import copy_all

if TYPE_CHECKING:
    from lightning_megatron_rl.weights.copy_kernels import CopyTable, Piece

Pair = tuple[Tensor, Tensor]  # target and source


class Copies:
    """Copies between pairs of tensors, in as few operations as there can be.

    On a GPU those that are run again are one kernel, which a table of them is made for then.

    Args:
        targets: Where to; they stay where they are.
        sources: Where from; each has its target's shape, and stays as well.
    """

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self._pairs = list(zip(targets, sources, strict=True))
        self._lists = _in_lists(self._pairs)
        self._tables: list[CopyTable] | None = None  # of what the lists do not have any more
        self._is_new = True

    @torch.no_grad()
    def run(self) -> None:
        """Copy."""
        if self._tables is None and not self._is_new:
            self._prepare()
        self._is_new = False
        for table in self._tables or ():
            table.run()
        for targets, sources in self._lists:
            copy_all(targets, sources)

    def _prepare(self) -> None:
        if not any(target.is_cuda for target, _ in self._pairs):
            self._tables = []
            return
        from lightning_megatron_rl.weights.copy_kernels import CopyTable, pieces_of

        pieces: dict[torch.device, list[Piece]] = {}
        rest = []
        for target, source in self._pairs:
            is_plain = target.is_cuda and source.device == target.device and source.dtype == target.dtype
            found = pieces_of(target, source) if is_plain else None
            if found is None:
                rest.append((target, source))
            else:
                pieces.setdefault(target.device, []).extend(found)
        tables = [CopyTable(found, device) for device, found in pieces.items()]
        self._lists, self._tables = _in_lists(rest), tables  # both or, where there is no memory for a table, neither


def _in_lists(pairs: Iterable[Pair]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return targets and sources by dtype and layout: torch copies those of one list in a few kernels."""
    lists: dict[tuple[torch.dtype, torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        is_dense = target.is_contiguous() and source.is_contiguous()
        pair = (target, source) if is_dense else _as_words(target, source)
        into, out_of = lists.setdefault((pair[0].dtype, pair[1].dtype, is_dense), ([], []))
        into.append(pair[0])
        out_of.append(pair[1])
    return list(lists.values())


def _as_words(target: Tensor, source: Tensor) -> Pair:
    """Return a pair in elements of 8 bytes, of which a strided copy has fewer; as it is where that cannot be."""
    if target.dtype == source.dtype:
        with suppress(RuntimeError):  # sizes, strides or offsets are no multiples
            return target.view(torch.int64), source.view(torch.int64)
    return target, source
