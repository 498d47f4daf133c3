"""Whitening: values shifted and scaled to mean 0 and standard deviation 1 over all ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]
"""Sums a float64 vector over the data-parallel ranks and returns it; called equally often by every rank."""

EPSILON = 1e-6  # keeps values without spread finite; the same as in group-relative advantages


def one_rank(vector: Tensor) -> Tensor:
    """Return the vector: the `AllReduce` of a single rank."""
    return vector


def whiten(values: Tensor, mask: Tensor | None = None, *, all_reduce: AllReduce = one_rank) -> Tensor:
    """Return (x - mean) / (std + 1e-6), mean and unbiased std over the values of all ranks, in the dtype of `values`.

    Args:
        values: Any shape; a rank may have none.
        mask: Bool of that shape; values that do not count are never looked at and become 0.
        all_reduce: Called twice by every rank: the squares are summed around the global mean, so that a large common
            offset costs no digits.

    Example:
        ``whiten(torch.tensor([1.0, 2.0, 3.0]))`` is [-1.0, 0.0, 1.0].
    """
    valid = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    known = torch.where(valid, values.double(), 0.0)
    total, count = all_reduce(torch.stack([known.sum(), valid.sum().double()])).unbind()
    centred = torch.where(valid, known - total / count.clamp(min=1), 0.0)
    (squares,) = all_reduce(centred.square().sum()[None]).unbind()
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return (centred / (std + EPSILON)).to(values.dtype)
