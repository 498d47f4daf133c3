"""The GRPO objective per token: policy loss, KL to the reference, entropy, correction of the mismatch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.aggregation import sequence_weights
from lightning_megatron_rl.algorithms.correction import Correction, correction
from lightning_megatron_rl.algorithms.kl import kl_penalty
from lightning_megatron_rl.algorithms.masks import off_policy_mask, top_entropy_mask
from lightning_megatron_rl.algorithms.metrics import add_mismatch_metrics, add_policy_metrics
from lightning_megatron_rl.algorithms.policy_losses import PolicyLoss, policy_loss
from lightning_megatron_rl.algorithms.registry import check_per_token
from lightning_megatron_rl.algorithms.sequences import Sequences
from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.algorithms.whitening import one_rank
from lightning_megatron_rl.data.packing import MicroBatch
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig

__all__ = ["GRPOLoss", "GRPOLossConfig"]

TOP_ENTROPY_FIELD = "top_entropy"  # 1 where a token has a policy loss, 0 where its entropy is too low


class GRPOLoss:
    """Per-token loss and per-sequence weights of one configuration.

    Args:
        config: The objective.
        sum_over_shares: Sums a tensor in place over the ranks that each hold a part of every sequence.
    """

    def __init__(self, config: GRPOLossConfig, sum_over_shares: Callable[[Tensor], Tensor] = one_rank) -> None:
        self.config = config
        self.sum_over_shares = sum_over_shares
        self.entropy_coef = config.entropy_coef  # of the current step
        self.policy_loss: PolicyLoss = partial(policy_loss(config.policy_loss), **config.policy_loss_options())
        self._clip_range = config.clip_range
        self.correction: Correction | None = None
        if config.correction is not None:
            self.correction = partial(correction(config.correction), **config.correction_options())

    def set_step(self, step: int) -> None:
        """Take the coefficients of `global_step` `step`."""
        schedule = self.config.entropy_schedule
        if schedule is not None:
            self.entropy_coef = schedule.at(step, start=self.config.entropy_coef)

    def __call__(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor, tally: Tally) -> Tensor:
        """Return the loss of each token, ``[b, s]``; a `TokenLoss` of `PolicyModule.update`.

        Without a field "old_logprobs" the old policy is the one that is updated: its log-probs are these, and what they
        are to the sampler's is found here.
        """
        config, fields, mask = self.config, batch.fields, batch.mask
        advantages, old, weights = fields["advantages"], fields.get("old_logprobs"), fields.get("correction_weights")
        # masked positions hold log-probs of padding: take them out before any exp
        logprobs = torch.where(mask, logprobs, 0.0 if old is None else old)
        sequences = Sequences(batch.sequence_index, mask, batch.num_sequences, self.sum_over_shares)
        if old is None:
            old, sampled = logprobs.detach(), fields["rollout_logprobs"]
            known: Any = {"sequences": sequences}
            weights = None if self.correction is None else self.correction(old, sampled, mask, **known)
            add_mismatch_metrics(tally, old, sampled, mask, weights)
        within: Any = {"correction_weights": weights} if config.corrects_within_loss else {}
        losses, ratio = self._token_losses(self.policy_loss(logprobs, old, advantages, sequences, **within), mask)
        if not config.corrects_within_loss:
            if weights is not None and config.weighs_sequences and config.weight_level == "token":
                # the loss of a sequence times each of these weights, added up: in the token form, their mean
                weights = sequences.mean(weights)
            losses = losses if weights is None else losses * weights
        if config.off_policy_mask_threshold is not None:
            kept = off_policy_mask(
                logprobs, fields["rollout_logprobs"], advantages, sequences, threshold=config.off_policy_mask_threshold
            )
            losses = losses * kept
            tally.add_mean("policy/off_policy_masked_frac", ~kept, mask)
        bonus = entropy
        if TOP_ENTROPY_FIELD in fields:
            losses, bonus = losses * fields[TOP_ENTROPY_FIELD], entropy * fields[TOP_ENTROPY_FIELD]
            tally.add_mean("policy/entropy_masked_frac", fields[TOP_ENTROPY_FIELD] == 0, mask)
        reference = fields.get("ref_logprobs")
        if reference is not None and config.kl_coef and config.kl_in == "loss":
            weighted_by = old if config.kl_importance_weighting else None
            losses = losses + config.kl_coef * kl_penalty(
                logprobs, reference, config.kl_estimator, old_logprobs=weighted_by
            )
        if self.entropy_coef:
            losses = losses - self.entropy_coef * bonus
        clip_low, clip_high = self._clip_range
        add_policy_metrics(
            tally,
            logprobs=logprobs.detach(),
            old_logprobs=old,
            ref_logprobs=reference,
            advantages=advantages,
            entropy=entropy.detach(),
            mask=mask,
            clip_low=clip_low,
            clip_high=clip_high,
            ratio=ratio,
        )
        return losses

    def _token_losses(self, returned: Any, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the ratio of each token.

        Raises:
            ValueError: A policy loss of the user's own returned something else.
        """
        choice = self.config.policy_loss
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise ValueError(
                f"policy loss {choice!r} returned a {type(returned).__name__}: return the loss and the ratio of each"
                " token, (loss, ratio)"
            )
        losses, ratios = returned
        check_per_token("policy loss", choice, mask.shape, losses=losses, ratios=ratios)
        return losses, ratios

    def correction_weights(self, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor | None:
        """Return the weight of each token against the mismatch, ``[sequences, tokens]``, or None without correction.

        Args:
            old_logprobs: Trainer's log-probs, one sequence per row, padded on the right.
            rollout_logprobs: Sampler's log-probs.
            mask: Response tokens.
        """
        if self.correction is None:
            return None
        weights: Tensor = self.correction(old_logprobs, rollout_logprobs, mask)
        check_per_token("correction", self.config.correction, mask.shape, weights=weights)
        return weights

    def top_entropy_masks(
        self, entropies: list[Tensor], masks: list[Tensor], all_reduce: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Return per sequence which tokens have a policy loss, bool ``[tokens]``; a collective.

        The share `top_entropy_quantile` is of the tokens of all sequences of all replicas.

        Args:
            entropies: Of each sequence's tokens under the old policy, nats.
            masks: Tokens that the loss sums over.
            all_reduce: Sums a tensor over the data-parallel ranks.
        """
        nothing = torch.empty(0)
        kept = top_entropy_mask(
            torch.cat([nothing, *entropies]),
            torch.cat([nothing.bool(), *masks]),
            quantile=self.config.top_entropy_quantile,
            all_reduce=all_reduce,
        )
        return list(kept.split([len(mask) for mask in masks]))

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
            response_lengths: Tokens of each sequence of this replica that the loss sums over.
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
