"""Importance weights that correct the loss for the mismatch between the trainer and the sampler."""

from typing import Literal, Protocol

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.policy_losses import log_ratio
from lightning_megatron_rl.algorithms.registry import Returned, choose
from lightning_megatron_rl.algorithms.sequences import Sequences


class Correction(Protocol):
    """Weights of the tokens' policy losses from log π_old (trainer) and log π_roll (sampler), without gradient.

    All are `[b, s]`, a row is one whole sequence, and the bool `mask` marks the tokens that count. A weight of 0
    rejects a token, which keeps its place in the denominator.
    """

    def __call__(self, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Returned:
        """Return the weight of each token, a tensor `[b, s]`."""
        ...


@torch.no_grad()
def truncated_importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    level: Literal["token", "sequence"] = "token",
    cap: float = 2.0,
    sequences: Sequences | None = None,
) -> Tensor:
    """Weights min(w, cap) without gradient, w = exp(log π_old - log π_roll), the exponent clamped to ±20 (`tis`).

    Truncation bounds the variance for a small bias (Ionides, Truncated Importance Sampling, 2008). The log-probs are
    `[T]` valid tokens or `[b, s]` with a bool `mask` of that shape; masked positions get weight 0. At level "sequence"
    w is the product over the valid tokens of a sequence, the same for each of them. A sequence is a row of `[b, s]`, or
    what `sequences` says, which `[T]` needs.

    Raises:
        ValueError: an unknown level, a cap that is not positive, or `[T]` at level "sequence" without `sequences`.

    Example:
        log π_old - log π_roll = [ln 1.5, ln 3] gives [1.5, 2] per token and, being one sequence, [2, 2] per sequence.
    """
    if not cap > 0:
        raise ValueError(f"the importance weights' cap is {cap}: choose a positive number (2 is usual)")
    valid = torch.ones_like(old_logprobs, dtype=torch.bool) if mask is None else mask
    weights = _importance_weights(old_logprobs, rollout_logprobs, valid, level, sequences)
    return torch.where(valid, weights.clamp(max=cap), 0.0).to(old_logprobs.dtype)


@torch.no_grad()
def icepop_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    level: Literal["token", "sequence"] = "token",
    low: float = 0.5,
    high: float = 5.0,
    sequences: Sequences | None = None,
) -> Tensor:
    """Weights w where low <= w <= high and 0 elsewhere, w as in `truncated_importance_weights` (IcePop, Ring-1T).

    Where trainer and sampler disagree that much on a token, it is rejected instead of being weighted with the bound; at
    level "sequence" the whole sequence is (MIS, Liu et al., 2025). Shapes are any, of all three alike; at level
    "sequence" a row of `[b, s]` is one whole sequence, if `sequences` does not say otherwise.

    Raises:
        ValueError: Not 0 <= low < 1 < high; an unknown level.

    Example:
        w = [0.4, 1.5, 6.0] gives [0.0, 1.5, 0.0].
    """
    _check_bounds("icepop", low, high)
    weights = _importance_weights(old_logprobs, rollout_logprobs, mask, level, sequences)
    return torch.where(mask & (weights >= low) & (weights <= high), weights, 0.0).to(old_logprobs.dtype)


@torch.no_grad()
def geometric_mask(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    low: float = 0.99,
    high: float = 1.01,
    sequences: Sequences | None = None,
) -> Tensor:
    """Weights 1 for the tokens of sequences whose exp(mean of log w) is in [low, high], else 0 (`geo_mask`).

    All are `[b, s]`, a row is one whole sequence, if `sequences` does not say otherwise. The geometric mean does not
    grow with the length, so long sequences are not rejected for being long.

    Raises:
        ValueError: Not 0 <= low < 1 < high.

    Example:
        A row with log w = [0.02, -0.01] has e^0.005 = 1.005 and is kept, one with [0.02, 0.02] has 1.02 and is not.
    """
    _check_bounds("geo_mask", low, high)
    mean = (sequences or _rows(mask)).mean(old_logprobs.double() - rollout_logprobs.double())
    ratio = log_ratio(mean, torch.zeros_like(mean)).exp()
    return (mask & (ratio >= low) & (ratio <= high)).to(old_logprobs.dtype)


CORRECTIONS: dict[str, Correction] = {
    "tis": truncated_importance_weights,
    "icepop": icepop_weights,
    "geo_mask": geometric_mask,
}


def correction(choice: str | Correction) -> Correction:
    """Return the correction of a name or dotted path, or a user's own callable; see `registry.choose`."""
    return choose(CORRECTIONS, choice, "correction", ("old_logprobs", "rollout_logprobs", "mask"))


def _check_bounds(name: str, low: float, high: float) -> None:
    if not 0 <= low < 1 < high:
        raise ValueError(f"the bounds [{low}, {high}] of {name} must contain 1: choose 0 <= low < 1 < high")


def _importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, valid: Tensor, level: str, sequences: Sequences | None
) -> Tensor:
    """Return exp(log π_old - log π_roll) of each token, or the product over each token's sequence, float64.

    Raises:
        ValueError: An unknown level, or sequences that cannot be told apart.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"unknown level {level!r} of the importance weights: choose one of sequence, token")
    differences = torch.where(valid, old_logprobs.double() - rollout_logprobs.double(), 0.0)
    if level == "sequence":
        differences = (sequences or _rows(valid)).sum(differences)
    return log_ratio(differences, torch.zeros_like(differences)).exp()


def _rows(mask: Tensor) -> Sequences:
    """Return the rows of `[b, s]` as sequences.

    Raises:
        ValueError: There are none.
    """
    if mask.dim() != 2:
        raise ValueError(
            f"log-probs of shape {tuple(mask.shape)} do not tell where a sequence ends: pass sequences, or use"
            ' level="token"'
        )
    return Sequences(torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask), mask, len(mask))
