"""From rewards to what advantages are made of: the penalty of overlong responses, and KL to the reference."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.kl import k3, k3_capped, kl_estimator, kl_penalty
from lightning_megatron_rl.algorithms.overlong import overlong_penalty
from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.rollout_batch import Rollout


@dataclass
class OverlongSettings:
    """What becomes of responses that come near the limit `sampling.max_tokens` or are cut by it (DAPO).

    Args:
        penalty: Subtracted from the reward of a response at the limit; 0 for no penalty.
        buffer: Share of the limit over which the penalty grows from 0, before the limit.
        filter: Leave responses that the limit cut out of the loss and its count of tokens.

    Raises:
        ValueError: A negative penalty, or a buffer that is no share.

    Example:
        ``OverlongSettings(penalty=1.0, buffer=0.2)``: at a limit of 100 tokens 90 cost 0.5.
    """

    penalty: float = 1.0
    buffer: float = 0.2
    filter: bool = False

    def __post_init__(self) -> None:
        overlong_penalty(torch.zeros(0), max_length=1, buffer=self.buffer, penalty=self.penalty)


def shaped_rewards(
    rollout: Rollout,
    config: GRPOLossConfig,
    overlong: OverlongSettings | None,
    *,
    max_response_length: int,
    tally: Tally,
) -> Tensor:
    """Return the rewards that one advantage per sample is made of, float64 `[samples]`: what `penalised_rewards` are
    less the KL of all tokens.

    Args:
        rollout: With "old_logprobs", and "ref_logprobs" if KL goes into the reward.
        config: Says whether it does.
        overlong: Penalty of long responses.
        max_response_length: The limit, in tokens.
        tally: Gets ``reward/overlong_penalty`` and ``reward/kl_penalty``, each if there is such a thing.
    """
    rewards = penalised_rewards(rollout, overlong, max_response_length=max_response_length, tally=tally)
    kl = kl_penalties(rollout, config, tally)
    return rewards + torch.stack([penalty.sum() for penalty in kl]) if kl else rewards


def penalised_rewards(
    rollout: Rollout, overlong: OverlongSettings | None, *, max_response_length: int, tally: Tally
) -> Tensor:
    """Return the samples' rewards with the penalty of overlong ones, float64 `[samples]`.

    A sample's own `reward` stays what the reward functions said.
    """
    rewards = torch.tensor([sample.reward for sample in rollout.samples], dtype=torch.float64)
    if overlong is None or not overlong.penalty:
        return rewards
    lengths = torch.tensor([len(sample.policy_ids) for sample in rollout.samples])
    penalties = overlong_penalty(
        lengths, max_length=max_response_length, buffer=overlong.buffer, penalty=overlong.penalty
    )
    tally.add_mean("reward/overlong_penalty", penalties)
    return rewards + penalties


def kl_penalties(rollout: Rollout, config: GRPOLossConfig, tally: Tally) -> list[Tensor]:
    """Return -kl_coef times the KL of each token, float64 `[tokens]` per sequence; empty if KL is not in the reward.

    The tally gets ``reward/kl_penalty`` and, of k3, ``reward/kl_capped_frac``.
    """
    if not config.kl_coef or config.kl_in != "reward":
        return []
    penalties = []
    for sequence in rollout.sequences:
        old, reference = sequence.fields["old_logprobs"].double(), sequence.fields["ref_logprobs"].double()
        mask = sequence.loss_mask
        penalty = torch.zeros(len(mask), dtype=torch.float64)
        penalty[mask] = -config.kl_coef * kl_penalty(old[mask], reference[mask], config.kl_estimator)
        penalties.append(penalty)
        if kl_estimator(config.kl_estimator) is k3:
            tally.add_mean("reward/kl_capped_frac", k3_capped(old[mask], reference[mask]))
    if penalties:
        tally.add_mean("reward/kl_penalty", torch.stack([penalty.sum() for penalty in penalties]))
    return penalties
