"""Per-token estimators of the KL divergence from samples (Schulman, http://joschu.net/blog/kl-approx.html)."""

from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.policy_losses import log_ratio
from lightning_megatron_rl.algorithms.registry import Returned, check_per_token, choose

MAX_K3 = 10.0  # one token with a vanishing probability must not outweigh the batch; reached at d = 2.61 and at d = -11


class KLEstimator(Protocol):
    """From log-probs under π and π_ref of tokens sampled by π, of one shape, to an estimate per token of the KL."""

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Returned:
        """Return the estimate of each token, a tensor; the gradient of `logprobs` is kept."""
        ...


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return log π - log π_ref: unbiased as a value, but its gradient has mean zero, so use it in the reward only."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return (log π - log π_ref)² / 2: biased as a value, with the gradient of the reverse KL when on policy."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return e^d - d - 1 at most 10, d = log π_ref - log π clamped to ±20: unbiased below the cap, never negative.

    Where the cap is reached, at d > 2.61 and at d < -11, the gradient is exactly 0: the token is no longer drawn to the
    reference. `k3_capped` says where; k2 has no cap.

    Example:
        ``k3(torch.tensor([-1.0]), torch.tensor([-2.0]))`` is [e^-1] = [0.368].
    """
    difference = log_ratio(ref_logprobs, logprobs)
    return (torch.expm1(difference) - difference).clamp(max=MAX_K3)  # expm1: e^d - 1 loses all digits at small d


@torch.no_grad()
def k3_capped(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return where `k3` is at its cap and has no gradient, bool of the inputs' shape."""
    difference = log_ratio(ref_logprobs, logprobs)
    return torch.expm1(difference) - difference > MAX_K3


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimator(choice: str | KLEstimator) -> KLEstimator:
    """Return the estimator of a name or dotted path, or a user's own callable; see `registry.choose`."""
    return choose(KL_ESTIMATORS, choice, "KL estimator", ("logprobs", "ref_logprobs"))


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: str | KLEstimator = "k3",
    *,
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """KL(π || π_ref) per token, of the shape of the inputs (any).

    The tokens were sampled by π, or by `old_logprobs`: then each estimate is weighted with the ratio e^d of `ppo_clip`,
    with its gradient. This makes value and gradient unbiased off policy for k1 and k3 (arXiv:2512.02556), and gives k1,
    whose own gradient has mean zero, the gradient of the KL divergence. At k3's cap the ratio's gradient is left out as
    well: with a constant estimate it would only lower log π, also where π_ref is the larger one.

    Raises:
        ValueError: an unknown estimator, or one of the user's own that returns another shape.

    Example:
        ``kl_penalty(logprobs, logprobs, "k3")`` is exactly 0 everywhere.
    """
    estimate = kl_estimator(estimator)(logprobs, ref_logprobs)
    check_per_token("KL estimator", estimator, logprobs.shape, estimates=estimate)
    if old_logprobs is None:
        return estimate
    ratio = log_ratio(logprobs, old_logprobs).exp()
    if kl_estimator(estimator) is k3:
        ratio = torch.where(k3_capped(logprobs, ref_logprobs), ratio.detach(), ratio)
    return ratio * estimate
