"""Many copies between pairs of tensors, prepared once."""

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor


class Copies:
    """Copies between pairs of tensors, in as few operations as there can be.

    Args:
        targets: Where to.
        sources: Where from; each has its target's shape.

    Example:
        ``Copies(parameters, views).run()`` after each change of what the views look at.
    """

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        # one dtype and one layout in a list: then torch copies it in a few kernels, otherwise pair by pair
        self._lists: dict[tuple[torch.dtype, torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
        for target, source in zip(targets, sources, strict=True):
            is_dense = target.is_contiguous() and source.is_contiguous()
            pair = (target, source) if is_dense else _as_words(target, source)
            into, out_of = self._lists.setdefault((pair[0].dtype, pair[1].dtype, is_dense), ([], []))
            into.append(pair[0])
            out_of.append(pair[1])

    @torch.no_grad()
    def run(self) -> None:
        """Copy."""
        for targets, sources in self._lists.values():
            torch._foreach_copy_(targets, sources)


def _as_words(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Return a pair in elements of 8 bytes, of which a strided copy has fewer; as it is where that cannot be."""
    if target.dtype == source.dtype:
        with suppress(RuntimeError):  # sizes, strides or offsets are no multiples
            return target.view(torch.int64), source.view(torch.int64)
    return target, source
