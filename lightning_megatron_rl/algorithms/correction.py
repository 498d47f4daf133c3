"""Importance weights that correct the loss for the mismatch between the trainer and the sampler."""

from typing import Literal

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.policy_losses import log_ratio


@torch.no_grad()
def truncated_importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    level: Literal["token", "sequence"] = "token",
    cap: float = 2.0,
    sequence_index: Tensor | None = None,
) -> Tensor:
    """Weights min(w, cap) without gradient, w = exp(log π_old - log π_roll), the exponent clamped to ±20 (`tis`).

    Truncation bounds the variance for a small bias (Ionides, Truncated Importance Sampling, 2008). The log-probs are
    `[T]` valid tokens or `[b, s]` with a bool `mask` of that shape; masked positions get weight 0. At level "sequence"
    w is the product over the valid tokens of a sequence, the same for each of them. A sequence is a row of `[b, s]`, or
    the tokens with one number in `sequence_index` (integers >= 0, shape of the log-probs), which `[T]` needs; all
    tokens of a sequence must be in the call.

    Raises:
        ValueError: an unknown level, a cap that is not positive, or `[T]` at level "sequence" without `sequence_index`.

    Example:
        log π_old - log π_roll = [ln 1.5, ln 3] gives [1.5, 2] per token and, being one sequence, [2, 2] per sequence.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"unknown level {level!r} of the importance weights: choose one of sequence, token")
    if not cap > 0:
        raise ValueError(f"the importance weights' cap is {cap}: choose a positive number (2 is usual)")
    valid = torch.ones_like(old_logprobs, dtype=torch.bool) if mask is None else mask
    if level == "token":
        weights = log_ratio(old_logprobs, rollout_logprobs).exp().clamp(max=cap)
    else:
        if sequence_index is None:
            if old_logprobs.dim() != 2:
                raise ValueError(
                    f"log-probs of shape {tuple(old_logprobs.shape)} do not tell where a sequence ends: "
                    'pass sequence_index, or use level="token"'
                )
            sequence_index = torch.arange(len(old_logprobs), device=old_logprobs.device)[:, None].expand_as(valid)
        weights = _sequence_ratio(old_logprobs, rollout_logprobs, valid, sequence_index).clamp(max=cap)
    return torch.where(valid, weights, 0.0).to(old_logprobs.dtype)


def _sequence_ratio(old_logprobs: Tensor, rollout_logprobs: Tensor, valid: Tensor, sequence_index: Tensor) -> Tensor:
    """Return the product of the token ratios of each token's sequence, of the log-probs' shape, float64."""
    if old_logprobs.numel() == 0:
        return torch.zeros_like(old_logprobs, dtype=torch.float64)
    differences = torch.where(valid, old_logprobs.double() - rollout_logprobs.double(), 0.0)
    sums = differences.new_zeros(int(sequence_index.max()) + 1)
    sums.index_add_(0, sequence_index.flatten(), differences.flatten())
    return log_ratio(sums, torch.zeros_like(sums)).exp()[sequence_index]
