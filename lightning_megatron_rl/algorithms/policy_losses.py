"""Policy-gradient losses per token, by name or as a user's own callable."""

import math
from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.registry import choose
from lightning_megatron_rl.algorithms.sequences import Sequences

MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8: far beyond any clip range, and squares of it still fit fp32
MIN_LOG_WEIGHT = math.log(1e-8)  # of a sequence's weight in vespo


class PolicyLoss(Protocol):
    """The call that every policy loss answers; options beyond it need defaults (or `functools.partial`).

    Args are log-probs and advantages of one shape, `[T]` valid tokens or `[b, s]`; `sequences` says which of them make
    one sequence, for losses with a ratio per sequence. Only `logprobs` carries a gradient. Returns the loss per token,
    not yet aggregated, and the importance ratio per token without gradient, both of that shape.

    Example:
        ``def reinforce(logprobs, old_logprobs, advantages, sequences=None):`` (annotated as below)
        ``return -advantages * logprobs, torch.ones_like(advantages)``
    """

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Sequences | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (loss per token, ratio per token)."""
        ...


def log_ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """Return logprobs - base_logprobs clamped to ±20, so that its exponential is finite; no gradient beyond."""
    return (logprobs - base_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequences: Sequences | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate loss (PPO, arXiv:1707.06347), separate low and high clip (DAPO, arXiv:2503.14476).

    With r = e^d, d = logprobs - old_logprobs clamped to ±20: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); for
    A < 0 at most -dual_clip A (arXiv:1912.09729), None for no such bound. All tensors have one shape, any; padded
    batches are indexed with their mask first. The ratio is per token, so `sequences` changes nothing here.

    Returns:
        The loss per token and the ratio r per token without gradient.

    Raises:
        ValueError: a clip range that is not 0 <= clip_low < 1, clip_high >= 0, dual_clip > 1.

    Example:
        At r = 1.5 and A = 1 the loss is -1.2 and its gradient 0; at r = 1.5 and A = -1 it is 1.5.
    """
    _check_range(clip_low, clip_high)
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(
            f"dual_clip={dual_clip} would clip ratios below 1: choose a number above 1 (3 is usual) or None"
        )
    ratio = log_ratio(logprobs, old_logprobs).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss, ratio.detach()


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequences: Sequences | None = None,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate loss with one ratio per sequence (GSPO, arXiv:2507.18071), in its token form.

    s = exp(mean over the response of d), d as in `ppo_clip`. Each token has s_t = exp(log π - sg(log π) + sg(log s)):
    the value of s and the gradient of its own log-prob, so that the mean over a sequence's tokens of
    max(-A s_t, -A clip(s_t, 1 - clip_low, 1 + clip_high)) has the value and the gradient of the sequence's loss. It is
    to be aggregated with `seq_mean_token_mean`. Ranges are far narrower than those of a token's ratio.

    Returns:
        The loss per token and the sequence's ratio s at each of its tokens.

    Raises:
        ValueError: No `sequences`, or a clip range that is not 0 <= clip_low < 1, clip_high >= 0.

    Example:
        Two tokens with d = 0.2 and 0.4 have s = e^0.3 each; with A = 1 and a range up to 1.5 their loss is -1.35.
    """
    _check_range(clip_low, clip_high)
    mean = _known("gspo", sequences).mean(log_ratio(logprobs.detach(), old_logprobs))
    ratio = (logprobs - logprobs.detach() + mean).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    return loss, ratio.detach()


def luspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequences: Sequences | None = None,
    *,
    clip_low: float = 2e-3,
    clip_high: float = 2.5e-3,
) -> tuple[Tensor, Tensor]:
    """`gspo`'s loss of a sequence times the sequence's length (LUSPO, arXiv:2602.05261), in its token form.

    Per token it is `gspo`; what differs is the aggregation, `seq_mean_token_sum`: the sum over a sequence's tokens has
    the value and the gradient of its length times the sequence's loss.

    Returns:
        The loss per token and the sequence's ratio s at each of its tokens.

    Raises:
        ValueError: No `sequences`, or a clip range that is not 0 <= clip_low < 1, clip_high >= 0.
    """
    _known("luspo", sequences)
    return gspo(logprobs, old_logprobs, advantages, sequences, clip_low=clip_low, clip_high=clip_high)


def vespo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequences: Sequences | None = None,
    *,
    correction_weights: Tensor | None = None,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> tuple[Tensor, Tensor]:
    """Policy gradient weighted by a smooth function of the sequence's ratio, -φ(w) A log π (VESPO, arXiv:2602.10693).

    φ(w) = e^(λ + k log w - λ w) without gradient, 1 at w = 1; k and λ are those of A >= 0 or of A < 0. w is the product
    over the sequence of r, as in `ppo_clip`, and of the correction for the sampler, in [1e-8, e^20]. The correction is
    part of w: do not multiply it with the loss as well.

    Args:
        correction_weights: Of each token, in w by their product; None for no correction. 0 counts as 1e-8, so one
            rejected token leaves nothing of its sequence.
        k_positive: How steeply sequences with w < 1 lose weight where A >= 0.
        lambda_positive: How steeply sequences with w > 1 lose weight where A >= 0.
        k_negative: As `k_positive`, where A < 0.
        lambda_negative: As `lambda_positive`, where A < 0.

    Returns:
        The loss per token and the sequence's w at each of its tokens.

    Raises:
        ValueError: No `sequences`; a negative k, a λ that is not positive, or both such that φ exceeds e^20.

    Example:
        Two tokens with r = 2 and 1 have w = 2; with A = 1 their weight is φ = e^(3 + 2 log 2 - 6) = 0.199.
    """
    check_vespo(k_positive=k_positive, lambda_positive=lambda_positive)
    check_vespo(k_negative=k_negative, lambda_negative=lambda_negative)
    sequences = _known("vespo", sequences)
    log_weights = log_ratio(logprobs.detach(), old_logprobs)
    if correction_weights is not None:
        log_weights = log_weights + correction_weights.log().clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO)
    total = sequences.sum(log_weights).clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO)
    is_positive = advantages >= 0
    k = torch.full_like(total, k_negative).masked_fill(is_positive, k_positive)
    lam = torch.full_like(total, lambda_negative).masked_fill(is_positive, lambda_positive)
    weights = total.exp()
    return -(lam + k * total - lam * weights).exp() * advantages * logprobs, weights


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequences: Sequences | None = None,
    *,
    clip_high: float = 4.0,
) -> tuple[Tensor, Tensor]:
    """Policy gradient with a capped importance weight, -sg(min(r, 1 + clip_high)) A log π (CISPO, arXiv:2506.13585).

    No token loses its gradient: only its weight is bounded, from above. r as in `ppo_clip`.

    Returns:
        The loss per token and the ratio r per token.

    Raises:
        ValueError: A negative clip_high.

    Example:
        At r = 9, A = 1 and log π = -1 the loss is 5 and its gradient -5.
    """
    _check_range(0.0, clip_high)
    ratio = log_ratio(logprobs, old_logprobs).exp().detach()
    return -ratio.clamp(max=1 + clip_high) * advantages * logprobs, ratio


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequences: Sequences | None = None,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, Tensor]:
    """Soft gate in place of a clip range: -A σ(τ (r - 1)) 4 / τ, τ by the sign of A (SAPO, arXiv:2511.20347).

    At r = 1 the gradient is that of -A r; it fades smoothly on both sides, faster for a larger τ. r as in `ppo_clip`.

    Returns:
        The loss per token and the ratio r per token.

    Raises:
        ValueError: A temperature that is not positive.

    Example:
        At r = 1, A = 1 and τ = 1 the loss is -2 and its gradient -1.
    """
    if not (tau_positive > 0 and tau_negative > 0):
        raise ValueError(f"tau_positive={tau_positive} and tau_negative={tau_negative} must be positive (1 is usual)")
    ratio = log_ratio(logprobs, old_logprobs).exp()
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, ratio.detach()


def clip_masks(
    ratio: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, Tensor]:
    """Where `ppo_clip` cut a token's gradient at the (low, high) end of its range, bool of the inputs' shape.

    Low: A < 0 and r < 1 - clip_low. High: A > 0 and r > 1 + clip_high. Outside the range but with the other sign of A
    the unclipped term is the larger one, and the token still learns.

    Example:
        ``clip_masks(torch.tensor([0.5, 1.5]), torch.tensor([-1.0, -1.0]))`` is ([True, False], [False, False]).
    """
    return (advantages < 0) & (ratio < 1 - clip_low), (advantages > 0) & (ratio > 1 + clip_high)


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "luspo": luspo,
    "vespo": vespo,
    "cispo": cispo,
    "sapo": sapo,
}
SEQUENCE_LOSSES: tuple[PolicyLoss, ...] = (gspo, luspo)
"""Token forms of losses with one ratio and one value per sequence."""


def policy_loss(loss: str | PolicyLoss) -> PolicyLoss:
    """Return the loss of a name or dotted path, or a user's own callable; see `registry.choose`."""
    return choose(POLICY_LOSSES, loss, "policy loss", ("logprobs", "old_logprobs", "advantages", "sequences"))


def check_vespo(**settings: float) -> None:
    """Refuse a pair of `vespo`'s settings, k first and λ second, whose φ is no weight.

    φ is largest at w = k / λ, where log φ = λ + k (log(k / λ) - 1).

    Raises:
        ValueError: A negative k, a λ that is not positive, or log φ above 20.
    """
    (k_name, k), (lambda_name, lam) = settings.items()
    if not (0 <= k < math.inf and 0 < lam < math.inf):
        raise ValueError(
            f"{k_name}={k} and {lambda_name}={lam}: choose k >= 0 and λ > 0 (2 and 3 are usual where A >= 0, 3 and 2"
            " where A < 0)"
        )
    largest = lam + (k * (math.log(k / lam) - 1) if k else 0.0)
    if largest > MAX_LOG_RATIO:
        raise ValueError(
            f"{k_name}={k} and {lambda_name}={lam}: sequences with w = k / λ = {k / lam:.3g} would be weighted with"
            f" e^(λ + k (log(k / λ) - 1)) = e^{largest:.3g}, the limit is e^{MAX_LOG_RATIO:g}: bring k and λ closer"
            " together"
        )


def _known(name: str, sequences: Sequences | None) -> Sequences:
    if sequences is None:
        raise ValueError(f"{name} has one ratio per sequence: pass `sequences`, which says where they are")
    return sequences


def _check_range(clip_low: float, clip_high: float) -> None:
    if not 0 <= clip_low < 1 or not clip_high >= 0:
        raise ValueError(
            f"the clip range [1 - {clip_low}, 1 + {clip_high}] must contain 1 and only positive ratios: "
            "choose 0 <= clip_low < 1 and clip_high >= 0"
        )
