"""Per-token estimators of the KL divergence from samples (Schulman, http://joschu.net/blog/kl-approx.html)."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.policy_losses import log_ratio
from lightning_megatron_rl.algorithms.registry import lookup

MAX_K3 = 10.0  # one token with a vanishing probability must not outweigh the batch


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return log π - log π_ref: unbiased as a value, but its gradient has mean zero, so use it in the reward only.

    Example:
        ``k1(torch.tensor([-1.0]), torch.tensor([-2.0]))`` is [1.0].
    """
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return (log π - log π_ref)² / 2: biased as a value, with the gradient of the reverse KL when on policy.

    Example:
        ``k2(torch.tensor([-1.0]), torch.tensor([-3.0]))`` is [2.0].
    """
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return e^d - d - 1 at most 10, d = log π_ref - log π clamped to ±20: unbiased, never negative.

    Example:
        ``k3(torch.tensor([-1.0]), torch.tensor([-2.0]))`` is [e^-1] = [0.368].
    """
    difference = log_ratio(ref_logprobs, logprobs)
    return (torch.expm1(difference) - difference).clamp(max=MAX_K3)  # expm1: e^d - 1 loses all digits at small d


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k3") -> Tensor:
    """KL(π || π_ref) per token from tokens sampled by π, of the shape of both inputs (any).

    Raises:
        ValueError: an unknown estimator.

    Example:
        ``kl_penalty(logprobs, logprobs, "k3")`` is exactly 0 everywhere.
    """
    return lookup(KL_ESTIMATORS, estimator, "KL estimator")(logprobs, ref_logprobs)
