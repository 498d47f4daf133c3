"""From rewards to what advantages are made of: the penalty of overlong responses, and KL to the reference."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.kl import kl_penalty
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
    """Return the rewards that advantages are made of, float64 `[samples]`; adds the parts' means to `tally`.

    A sample's own `reward` stays what the reward functions said.

    Args:
        rollout: With "old_logprobs", and "ref_logprobs" if KL goes into the reward.
        config: Says whether it does.
        overlong: Penalty of long responses.
        max_response_length: The limit, in tokens.
        tally: Gets ``reward/overlong_penalty`` and ``reward/kl_penalty``, each if there is such a thing.
    """
    rewards = torch.tensor([sample.reward for sample in rollout.samples], dtype=torch.float64)
    if overlong is not None and overlong.penalty:
        lengths = torch.tensor([len(sample.response_ids) for sample in rollout.samples])
        penalties = overlong_penalty(
            lengths, max_length=max_response_length, buffer=overlong.buffer, penalty=overlong.penalty
        )
        tally.add_mean("reward/overlong_penalty", penalties)
        rewards = rewards + penalties
    if config.kl_coef and config.kl_in == "reward":
        kl = torch.zeros_like(rewards)
        for number, sequence in enumerate(rollout.sequences):
            old, reference = sequence.fields["old_logprobs"], sequence.fields["ref_logprobs"]
            mask = sequence.loss_mask
            kl[number] = kl_penalty(old[mask].double(), reference[mask].double(), config.kl_estimator).sum()
        tally.add_mean("reward/kl_penalty", -config.kl_coef * kl)
        rewards = rewards - config.kl_coef * kl
    return rewards
