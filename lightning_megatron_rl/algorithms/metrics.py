"""The metrics of the policy update and of the mismatch between trainer and sampler, added to a `Tally`."""

import math

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.kl import k3_capped, kl_penalty
from lightning_megatron_rl.algorithms.policy_losses import clip_masks, log_ratio
from lightning_megatron_rl.algorithms.tally import Tally

OUT_OF_BOUNDS = (0.5, 2.0)  # importance weights of a healthy sampler stay within a factor of two
ROUNDING = 1e-12  # share of Σ x² that float64 sums of millions of tokens may leave as variance of a constant


def add_mismatch_metrics(
    tally: Tally,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor | None = None,
    correction_weights: Tensor | None = None,
) -> None:
    """Add `mismatch/*`: how far the trainer's log-probs of the sampled tokens are from the sampler's own.

    The log-probs have one shape, `[T]` or `[b, s]`, and the bool `mask` as well; means and sums run over the T valid
    tokens of all micro-batches and ranks. With Δ = log π_old - log π_roll, clamped to ±20, and w = e^Δ, not truncated:

    - `abs_logp_diff`: mean of |log π_old - log π_roll|, not clamped
    - `k3`: mean of e^Δ - Δ - 1 (at most 10 per token), an estimate of KL(π_roll || π_old)
    - `token_mult_prob_error`: mean of e^|Δ|, 1 at best (as in NeMo-RL, which holds its recipes below 1.05)
    - `is_mean`, `is_max`: mean and maximum of w; the mean is 1 if both are distributions over the same tokens
    - `ess`: (Σ w)² / (T Σ w²), the effective share of the samples, in (0, 1]
    - `oob_frac`: share of tokens with w outside [0.5, 2]
    - `pearson`: correlation of the probabilities e^(log π_old) and e^(log π_roll); nan if either does not vary
    - `rejected_frac`: share of tokens that `correction_weights`, of the same shape, reject; left out if None

    Example:
        Equal log-probs give abs_logp_diff 0, k3 0, token_mult_prob_error 1, is_mean 1, is_max 1, ess 1, oob_frac 0.
    """
    old_logprobs, rollout_logprobs = _valid(old_logprobs, mask), _valid(rollout_logprobs, mask)
    delta = log_ratio(old_logprobs, rollout_logprobs)
    weights = delta.exp()
    low, high = OUT_OF_BOUNDS
    tally.add_mean("mismatch/abs_logp_diff", (old_logprobs - rollout_logprobs).abs(), mask)
    tally.add_mean("mismatch/k3", kl_penalty(rollout_logprobs, old_logprobs, "k3"), mask)
    tally.add_mean("mismatch/token_mult_prob_error", delta.abs().exp(), mask)
    tally.add_mean("mismatch/is_mean", weights, mask)
    tally.add_max("mismatch/is_max", weights, mask)
    tally.add_mean("mismatch/oob_frac", (weights < low) | (weights > high), mask)
    valid = torch.ones_like(weights) if mask is None else mask.double()
    count = valid.sum()
    weights = weights * valid
    tally.add("mismatch/ess", _ess, {"total": weights.sum(), "squares": weights.square().sum(), "count": count})
    x, y = old_logprobs.exp() * valid, rollout_logprobs.exp() * valid
    sums = {"x": x.sum(), "y": y.sum(), "xx": (x * x).sum(), "yy": (y * y).sum(), "xy": (x * y).sum(), "count": count}
    tally.add("mismatch/pearson", _pearson, sums)
    if correction_weights is not None:
        tally.add_mean("mismatch/rejected_frac", correction_weights == 0, mask)


def add_policy_metrics(
    tally: Tally,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    entropy: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    ratio: Tensor | None = None,
) -> None:
    """Add `policy/*`: how far the update has moved the policy, and what `ppo_clip` made of it.

    All tensors have one shape, `[T]` or `[b, s]`, and the bool `mask` as well; means run over the valid tokens of all
    micro-batches and ranks. With r = exp(log π_θ - log π_old), the difference clamped to ±20, or `ratio` where the
    policy loss has another one (of the whole sequence):

    - `kl_old`: mean k3 estimate of KL(π_old || π_θ) (at most 10 per token)
    - `ratio_max`: maximum of r
    - `clip_frac_low`: share of tokens with A < 0 and r < 1 - clip_low
    - `clip_frac_high`: share of tokens with A > 0 and r > 1 + clip_high
    - `entropy`: mean of `entropy`, of the full-vocabulary distributions; left out if None
    - `kl_ref`: mean k3 estimate of KL(π_θ || π_ref) (at most 10 per token); left out without `ref_logprobs`
    - `kl_capped_frac`: share of tokens at that bound, where k3 has no gradient; left out without `ref_logprobs`

    Example:
        Before the first update of a rollout kl_old is 0, ratio_max 1 and both clip fractions 0.
    """
    logprobs, old_logprobs = _valid(logprobs, mask), _valid(old_logprobs, mask)
    ratio = log_ratio(logprobs, old_logprobs).exp() if ratio is None else _valid(ratio, mask)
    clipped_low, clipped_high = clip_masks(ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    tally.add_mean("policy/kl_old", kl_penalty(old_logprobs, logprobs, "k3"), mask)
    tally.add_max("policy/ratio_max", ratio, mask)
    tally.add_mean("policy/clip_frac_low", clipped_low, mask)
    tally.add_mean("policy/clip_frac_high", clipped_high, mask)
    if entropy is not None:
        tally.add_mean("policy/entropy", entropy, mask)
    if ref_logprobs is not None:
        ref_logprobs = _valid(ref_logprobs, mask)
        tally.add_mean("policy/kl_ref", kl_penalty(logprobs, ref_logprobs, "k3"), mask)
        tally.add_mean("policy/kl_capped_frac", k3_capped(logprobs, ref_logprobs), mask)


def _valid(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the values in float64 without gradient, 0 at masked positions."""
    values = values.detach().double()
    return values if mask is None else torch.where(mask, values, 0.0)


def _ess(total: float, squares: float, count: float) -> float:
    return total * total / (count * squares) if count else math.nan


def _pearson(x: float, y: float, xx: float, yy: float, xy: float, count: float) -> float:
    if not count:
        return math.nan
    variance_x, variance_y = xx - x * x / count, yy - y * y / count
    if not (variance_x > ROUNDING * xx and variance_y > ROUNDING * yy):
        return math.nan
    return (xy - x * y / count) / math.sqrt(variance_x * variance_y)
