"""Which tensors hold NaN or infinity."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_NAMED = 3  # weights that a message names


@torch.no_grad()
def nonfinite_names(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of floating-point tensors that hold NaN or infinity, in their order.

    Each tensor is read once, nothing of its size is allocated, and a GPU is waited for once. Tensors on the meta device
    have no numbers and are left out.

    Example:
        ``nonfinite_names([("a", torch.tensor([1.0, torch.nan]))]) == ["a"]``
    """
    names: list[str] = []
    extremes: list[Tensor] = []
    for name, tensor in tensors:
        if tensor.is_floating_point() and not tensor.is_meta and tensor.numel():
            names.append(name)
            extremes.append(torch.stack(torch.aminmax(tensor.detach())).double())  # NaN comes through
    if not names:
        return []
    finite = torch.stack([pair.to(extremes[0].device) for pair in extremes]).isfinite().all(1).tolist()
    return [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]


def describe_nonfinite(tensor: Tensor) -> str:
    """Say how many numbers of a tensor are NaN or infinite.

    Example:
        ``describe_nonfinite(torch.tensor([1.0, torch.nan])) == "1 NaN and 0 infinite of 2 numbers"``
    """
    return f"{int(tensor.isnan().sum())} NaN and {int(tensor.isinf().sum())} infinite of {tensor.numel()} numbers"


def not_finite(names: Sequence[str]) -> str:
    """Return the end of an error about loaded weights that hold NaN or infinity."""
    more = len(names) - _NAMED
    return (
        f"{len(names)} loaded weights are not finite: {'; '.join(names[:_NAMED])}"
        + (f" and {more} more" if more > 0 else "")
        + ". Every loss would be NaN: restore the files from a copy, or start from an earlier checkpoint"
    )
