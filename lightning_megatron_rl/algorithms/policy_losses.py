"""Policy-gradient losses per token, by name or as a user's own callable."""

from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.registry import lookup

MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8: far beyond any clip range, and squares of it still fit fp32


class PolicyLoss(Protocol):
    """The call that every policy loss answers; options beyond it need defaults (or `functools.partial`).

    Args are log-probs and advantages of one shape, `[T]` valid tokens or `[b, s]`; `sequence_index` of that shape
    numbers the sequence that each token belongs to, for losses with a ratio per sequence. Only `logprobs` carries a
    gradient. Returns the loss per token, not yet aggregated, and the importance ratio per token, both of that shape.
    """

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequence_index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (loss per token, ratio per token)."""
        ...


def log_ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """Return logprobs - base_logprobs clamped to ±20, so that its exponential is finite; no gradient beyond.

    Example:
        ``log_ratio(torch.tensor([0.0]), torch.tensor([-50.0]))`` is [20.0].
    """
    return (logprobs - base_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate loss (PPO, arXiv:1707.06347), separate low and high clip (DAPO, arXiv:2503.14476).

    With r = e^d, d = logprobs - old_logprobs clamped to ±20: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); for
    A < 0 at most -dual_clip A (arXiv:1912.09729), None for no such bound. All tensors have one shape, any; padded
    batches are indexed with their mask first. The ratio is per token, so `sequence_index` changes nothing here.

    Returns:
        The loss per token and the ratio r per token without gradient.

    Raises:
        ValueError: a clip range that is not 0 <= clip_low < 1, clip_high >= 0, dual_clip > 1.

    Example:
        At r = 1.5 and A = 1 the loss is -1.2 and its gradient 0; at r = 1.5 and A = -1 it is 1.5.
    """
    if not 0 <= clip_low < 1 or clip_high < 0:
        raise ValueError(
            f"the clip range [1 - {clip_low}, 1 + {clip_high}] must contain 1 and only positive ratios: "
            "choose 0 <= clip_low < 1 and clip_high >= 0"
        )
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(
            f"dual_clip={dual_clip} would clip ratios below 1: choose a number above 1 (3 is usual) or None"
        )
    ratio = log_ratio(logprobs, old_logprobs).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss, ratio.detach()


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


POLICY_LOSSES: dict[str, PolicyLoss] = {"ppo_clip": ppo_clip}


def policy_loss(loss: str | PolicyLoss) -> PolicyLoss:
    """Return the loss registered under a name, or a user's own callable as it is.

    Example:
        ``policy_loss("ppo_clip") is ppo_clip``.
    """
    return lookup(POLICY_LOSSES, loss, "policy loss") if isinstance(loss, str) else loss
