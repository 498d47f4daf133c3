"""Which tokens of a micro-batch belong to one sequence, for losses that look at whole sequences."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.whitening import one_rank


@dataclass(frozen=True)
class Sequences:
    """Sums over the tokens of a sequence, also of one that is cut over several ranks (context parallelism).

    Every such rank calls the same methods in the same order, also one that holds no token of any response.

    Example:
        ``Sequences(torch.tensor([0, 0, 1]), torch.tensor([True, True, True]), 2).mean(torch.tensor([1.0, 3.0, 5.0]))``
        is [2.0, 2.0, 5.0].
    """

    index: Tensor  # number of the sequence of each token, -1 on padding; the losses' shape, int64
    mask: Tensor  # bool of that shape, the tokens that count
    num_sequences: int  # numbers are below this, on all ranks that share the sequences
    all_reduce: Callable[[Tensor], Tensor] = one_rank  # sums a float64 tensor over these ranks

    @torch.no_grad()
    def mean(self, values: Tensor) -> Tensor:
        """Mean over the counting tokens of each token's sequence, of the values' shape and dtype, without gradient.

        Where a sequence has no counting token, and on padding, it is 0. What stands at positions that do not count is
        never looked at.
        """
        total, count = self._sums(values)
        return self._spread(total / count.clamp(min=1), values.dtype)

    @torch.no_grad()
    def sum(self, values: Tensor) -> Tensor:
        """Sum over the counting tokens of each token's sequence; otherwise as `mean`."""
        return self._spread(self._sums(values)[0], values.dtype)

    def _sums(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum and the number of the counting values of each sequence, float64 `[sequences]`."""
        owner = torch.where(self.mask, self.index, 0).flatten()
        known = torch.where(self.mask, values.double(), 0.0).flatten()
        sums = known.new_zeros(2, max(self.num_sequences, 1))
        sums[0].index_add_(0, owner, known)
        sums[1].index_add_(0, owner, self.mask.flatten().double())
        total, count = self.all_reduce(sums).unbind()
        return total, count

    def _spread(self, of_sequences: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the value of each token's sequence, 0 on padding."""
        return torch.where(self.index >= 0, of_sequences[self.index.clamp(min=0)], 0.0).to(dtype)
