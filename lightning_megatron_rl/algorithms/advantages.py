"""Advantages of the G responses to each prompt, relative to their own group."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.registry import lookup


def grpo(rewards: Tensor) -> Tensor:
    """(r - mean) / (std + 1e-6) per row of rewards `[P, G]`, unbiased std (DeepSeekMath, arXiv:2402.03300).

    Example:
        ``grpo(torch.tensor([[1.0, 2, 3, 4]]))`` is [[-1.162, -0.387, 0.387, 1.162]].
    """
    return dr_grpo(rewards) / (rewards.std(dim=1, keepdim=True) + 1e-6)


def dr_grpo(rewards: Tensor) -> Tensor:
    """Return r - mean per row of rewards `[P, G]`: no bias towards easy and hard prompts (arXiv:2503.20783).

    Example:
        ``dr_grpo(torch.tensor([[1.0, 2, 3, 4]]))`` is [[-1.5, -0.5, 0.5, 1.5]].
    """
    return rewards - rewards.mean(dim=1, keepdim=True)


def rloo(rewards: Tensor) -> Tensor:
    """Return r minus the mean of the other G-1 of its row, (r - mean) * G / (G - 1) (arXiv:2402.14740).

    Example:
        ``rloo(torch.tensor([[1.0, 2, 3, 4]]))`` is [[-2.0, -0.667, 0.667, 2.0]].
    """
    group_size = rewards.shape[1]
    return dr_grpo(rewards) * group_size / (group_size - 1)


ADVANTAGE_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def group_advantages(rewards: Tensor, estimator: str = "grpo") -> Tensor:
    """Advantages `[P, G]` of P prompts with G responses each, in the dtype of the floating-point `rewards` `[P, G]`.

    A group whose rewards are all equal gets exactly 0, whatever rounding makes of its mean.

    Raises:
        ValueError: G = 1, rewards that are not `[P, G]`, or an unknown estimator.

    Example:
        ``group_advantages(torch.tensor([[1.0] + [0.0] * 7]), "grpo")`` starts with 2.475: one success in 8.
    """
    estimate = lookup(ADVANTAGE_ESTIMATORS, estimator, "advantage estimator")
    if rewards.dim() != 2:
        raise ValueError(f"rewards must be [prompts, generations], got the shape {tuple(rewards.shape)}")
    if rewards.shape[1] < 2:
        raise ValueError(
            f"{estimator} compares the responses to one prompt, but num_generations is {rewards.shape[1]}: "
            "set num_generations to at least 2 (8 is usual)"
        )
    advantages = estimate(rewards.double())
    return advantages.masked_fill(zero_spread(rewards)[:, None], 0.0).to(rewards.dtype)


def zero_spread(rewards: Tensor) -> Tensor:
    """Whether all G rewards of a prompt are equal, bool `[P]` from `[P, G]`: such a group teaches nothing.

    Example:
        ``zero_spread(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))`` is [True, False].
    """
    return (rewards == rewards[:, :1]).all(dim=1)


def zero_spread_fraction(rewards: Tensor) -> float:
    """Share of the P prompts of rewards `[P, G]` whose group has zero spread; nan without prompts.

    Example:
        ``zero_spread_fraction(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))`` is 0.5.
    """
    return zero_spread(rewards).to(torch.float64).mean().item()
