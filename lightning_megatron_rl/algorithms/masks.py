"""Tokens that the policy loss leaves out: of sequences that have gone off policy, and of low entropy."""

import math

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.sequences import Sequences
from lightning_megatron_rl.algorithms.whitening import AllReduce, one_rank

_DIGIT = 8  # bits that one pass of the selection settles
# Responses to a prompt begin at one entropy; in fp32 it differs by some 1e-7 of itself from one micro-batch to another.
_EQUAL = 1e-5


@torch.no_grad()
def off_policy_mask(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, sequences: Sequences, *, threshold: float
) -> Tensor:
    """Return which tokens are kept, bool: those with A >= 0, and those of sequences near the policy that sampled them.

    A sequence is near if the mean over its tokens of log π_roll - log π_θ is at most `threshold` (off-policy sequence
    masking, DeepSeek-V3.2, arXiv:2512.02556, equation 9). All tensors have the shape of `sequences.mask`.

    Example:
        log π_roll - log π_θ = [0.2, 1.2] with A = -1 and a threshold of 0.5: the mean is 0.7, both are left out.
    """
    return (advantages >= 0) | (sequences.mean(rollout_logprobs - logprobs) <= threshold)


@torch.no_grad()
def top_entropy_mask(entropies: Tensor, mask: Tensor, *, quantile: float, all_reduce: AllReduce = one_rank) -> Tensor:
    """Return which counting tokens are in the top `quantile` of the entropies of all ranks, bool of the inputs' shape.

    Of n tokens those are kept whose entropy is at least the (1 - quantile) quantile, linearly interpolated as
    `torch.quantile` does: n - ceil((1 - quantile) (n - 1)) tokens, and all that equal the least of them up to 1e-5 of
    it, of which else rounding would choose (Beyond the 80/20 Rule, arXiv:2506.01939; 0.2 is usual). 0 keeps the largest
    alone, 1 keeps all.

    Args:
        entropies: Of each token, nats, any shape; compared in fp32.
        mask: Bool of that shape; other tokens are never looked at.
        quantile: Share of the tokens, from 0 to 1.
        all_reduce: Called equally often by every rank, also by one without tokens. Nothing is gathered: the threshold
            is found digit by digit in the bits of the numbers, from counts of all ranks, and is one of the entropies.

    Example:
        ``top_entropy_mask(torch.tensor([0.1, 0.4, 0.2, 0.3]), torch.ones(4).bool(), quantile=0.5)`` keeps 0.4 and 0.3.
    """
    # the bits of non-negative floats are integers in the same order; rounding may leave an entropy of -1e-8
    values = torch.where(mask, entropies, 0.0).float().clamp(min=0).contiguous()
    keys = values.view(torch.int32).long()
    counted = keys[mask]
    count = int(all_reduce(torch.tensor([len(counted)], dtype=torch.float64, device=keys.device)).item())
    if not count:
        return torch.zeros_like(mask)
    kept = count - math.ceil((1 - quantile) * (count - 1) - 1e-6)  # 1 - 0.7 is more than 0.3 by a rounding error
    threshold = 0
    larger = 0.0  # tokens above all that the digits so far leave open
    for shift in range(32 - _DIGIT, -1, -_DIGIT):
        still_open = counted[counted >> (shift + _DIGIT) == threshold >> (shift + _DIGIT)]
        digits = (still_open >> shift) % 2**_DIGIT
        counts = all_reduce(torch.bincount(digits, minlength=2**_DIGIT).double())
        from_top = larger + counts.flip(0).cumsum(0)
        digit = 2**_DIGIT - 1 - int((from_top < kept).sum())  # the largest from which on there are enough
        larger += counts[digit + 1 :].sum().item()
        threshold |= digit << shift
    least = torch.tensor(threshold, dtype=torch.int32).view(torch.float32).item()
    return mask & (values.double() >= (1 - _EQUAL) * least)
