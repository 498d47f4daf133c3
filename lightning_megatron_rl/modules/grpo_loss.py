"""The GRPO objective per token: clipped policy loss, KL to the reference, entropy, importance correction."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.advantages import ADVANTAGE_ESTIMATORS
from lightning_megatron_rl.algorithms.aggregation import AGGREGATIONS, sequence_weights
from lightning_megatron_rl.algorithms.correction import truncated_importance_weights
from lightning_megatron_rl.algorithms.kl import KL_ESTIMATORS, kl_penalty
from lightning_megatron_rl.algorithms.metrics import add_policy_metrics
from lightning_megatron_rl.algorithms.policy_losses import ppo_clip
from lightning_megatron_rl.algorithms.registry import lookup
from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.data.packing import MicroBatch


@dataclass
class GRPOLossConfig:
    """Everything that shapes the objective; formulas in docs/algorithms.md.

    Args:
        advantage: "grpo", "dr_grpo" or "rloo".
        aggregation: How token losses become one number; denominators are global.
        clip_low: The ratio is clipped below at 1 - clip_low.
        clip_high: The ratio is clipped above at 1 + clip_high.
        dual_clip: Bound of the loss at negative advantages, as a multiple of the advantage; None for no bound.
        kl_coef: Weight of the KL divergence to the frozen reference; 0 means that no reference is built.
        kl_estimator: "k1", "k2" or "k3".
        entropy_coef: Weight of the entropy bonus.
        correction: "tis" truncates the trainer/sampler importance weight at `correction_cap`; None trusts the sampler.
        correction_level: One weight per token, or one per sequence.
        correction_cap: Upper bound of the weight.
    """

    advantage: str = "grpo"
    aggregation: str = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    correction: Literal["tis"] | None = "tis"
    correction_level: Literal["token", "sequence"] = "token"
    correction_cap: float = 2.0

    def __post_init__(self) -> None:
        lookup(ADVANTAGE_ESTIMATORS, self.advantage, "advantage")
        lookup(AGGREGATIONS, self.aggregation, "aggregation")
        lookup(KL_ESTIMATORS, self.kl_estimator, "kl_estimator")
        for name in ("clip_low", "clip_high", "kl_coef", "correction_cap"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: it cannot be negative.")
        if self.clip_low >= 1:
            raise ValueError(f"clip_low={self.clip_low}: the lower bound 1 - clip_low of the ratio must be positive.")


class GRPOLoss:
    """Per-token loss and per-sequence weights of one configuration.

    Args:
        config: The objective.

    Example:
        ``module.update(sequences, GRPOLoss(GRPOLossConfig()))``
    """

    def __init__(self, config: GRPOLossConfig) -> None:
        self.config = config

    def __call__(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor, tally: Tally) -> Tensor:
        """Return the loss of each token, ``[b, s]``; a `TokenLoss` of `PolicyModule.update`."""
        config, fields, mask = self.config, batch.fields, batch.mask
        old, advantages = fields["old_logprobs"], fields["advantages"]
        # masked positions hold log-probs of padding: take them out before any exp
        logprobs = torch.where(mask, logprobs, old)
        losses, _ = ppo_clip(
            logprobs,
            old,
            advantages,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
        if "correction_weights" in fields:
            losses = losses * fields["correction_weights"]
        reference = fields.get("ref_logprobs")
        if reference is not None:
            losses = losses + config.kl_coef * kl_penalty(logprobs, reference, config.kl_estimator)
        if config.entropy_coef:
            losses = losses - config.entropy_coef * entropy
        add_policy_metrics(
            tally,
            logprobs=logprobs.detach(),
            old_logprobs=old,
            ref_logprobs=reference,
            advantages=advantages,
            entropy=entropy.detach(),
            mask=mask,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
        )
        return losses

    def correction_weights(self, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor | None:
        """Return the truncated importance weight of each token of one sequence, or None without correction.

        Args:
            old_logprobs: Trainer's log-probs, ``[tokens]``.
            rollout_logprobs: Sampler's log-probs, ``[tokens]``.
            mask: Response tokens, ``[tokens]``.
        """
        config = self.config
        if config.correction is None:
            return None
        weights = truncated_importance_weights(
            old_logprobs[None],
            rollout_logprobs[None],
            mask[None],
            level=config.correction_level,
            cap=config.correction_cap,
        )
        return weights[0]

    def token_weights(
        self,
        response_lengths: Tensor,
        group_index: Tensor,
        *,
        max_response_length: int,
        all_reduce: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return per sequence the weight ``u = w * N`` of its tokens, ``[sequences]``; see `strategy.schedule`.

        Args:
            response_lengths: Response tokens of each sequence of this replica.
            group_index: Prompt each sequence belongs to.
            max_response_length: Longest response that sampling allows.
            all_reduce: Sums a tensor over the data-parallel ranks.
        """
        weights = sequence_weights(
            self.config.aggregation,
            response_lengths,
            group_index,
            max_response_length=max_response_length,
            all_reduce=all_reduce,
        )
        return weights * all_reduce(response_lengths.sum().double())
