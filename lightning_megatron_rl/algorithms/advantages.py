"""Advantages of the G responses to each prompt: relative to their own group, or to the whole batch."""

from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.registry import Returned, choose
from lightning_megatron_rl.algorithms.whitening import EPSILON, AllReduce, one_rank, whiten


class AdvantageEstimator(Protocol):
    """From the rewards of P prompts with G responses each, float64 `[P, G]`, to their advantages of that shape.

    `all_reduce` sums a float64 vector over the data-parallel ranks and returns it; an estimator calls it equally often
    on every rank, also on one without prompts (P = 0), or not at all.

    Example:
        ``def best_of(rewards: Tensor, all_reduce: Callable[[Tensor], Tensor]) -> Tensor:``
        ``return (rewards == rewards.amax(dim=1, keepdim=True)).double()``
    """

    def __call__(self, rewards: Tensor, all_reduce: AllReduce) -> Returned:
        """Return the advantages, a tensor `[P, G]`."""
        ...


def grpo(rewards: Tensor, all_reduce: AllReduce = one_rank) -> Tensor:
    """(r - mean) / (std + 1e-6) per row of rewards `[P, G]`, unbiased std (DeepSeekMath, arXiv:2402.03300).

    Example:
        ``grpo(torch.tensor([[1.0, 2, 3, 4]]))`` is [[-1.162, -0.387, 0.387, 1.162]].
    """
    return _centred(rewards) / (rewards.std(dim=1, keepdim=True) + EPSILON)


def dr_grpo(rewards: Tensor, all_reduce: AllReduce = one_rank) -> Tensor:
    """Return r - mean per row of rewards `[P, G]`: no bias towards easy and hard prompts (arXiv:2503.20783).

    Example:
        ``dr_grpo(torch.tensor([[1.0, 2, 3, 4]]))`` is [[-1.5, -0.5, 0.5, 1.5]].
    """
    return _centred(rewards)


def rloo(rewards: Tensor, all_reduce: AllReduce = one_rank) -> Tensor:
    """Return r minus the mean of the other G-1 of its row, (r - mean) * G / (G - 1) (arXiv:2402.14740).

    Example:
        ``rloo(torch.tensor([[1.0, 2, 3, 4]]))`` is [[-2.0, -0.667, 0.667, 2.0]].
    """
    group_size = rewards.shape[1]
    return _centred(rewards) * group_size / (group_size - 1)


def reinforce_pp(rewards: Tensor, all_reduce: AllReduce = one_rank) -> Tensor:
    """(r - mean) / (std + 1e-6) over all samples of all ranks (REINFORCE++, arXiv:2501.03262); one response will do.

    A group without spread is not neutral here: it is compared with the rest of the batch.

    Example:
        ``reinforce_pp(torch.tensor([[1.0], [2.0], [3.0]]))`` is [[-1.0], [0.0], [1.0]].
    """
    return whiten(rewards, all_reduce=all_reduce)


def reinforce_pp_baseline(rewards: Tensor, all_reduce: AllReduce = one_rank) -> Tensor:
    """Return r - mean of its row, divided by the std of these differences over all ranks (arXiv:2501.03262).

    The differences' mean is 0 already, so a group without spread stays at exactly 0.

    Example:
        ``reinforce_pp_baseline(torch.tensor([[0.0, 1.0], [4.0, 6.0]]))`` is [[-0.548, 0.548], [-1.095, 1.095]].
    """
    centred = _centred(rewards)
    # two sums, over values whose mean is 0 up to rounding
    squares, count = all_reduce(torch.stack([centred.square().sum(), centred.new_tensor(centred.numel())])).unbind()
    return centred / ((squares / (count - 1).clamp(min=1)).sqrt() + EPSILON)


ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}
GROUP_RELATIVE = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
"""Estimators that compare the responses to one prompt, and so need at least two of them."""


def advantage_estimator(choice: str | AdvantageEstimator) -> AdvantageEstimator:
    """Return the estimator of a name or dotted path, or a user's own callable; see `registry.choose`."""
    if choice == "gae":
        raise ValueError("the advantage 'gae' needs the values of a critic: GRPO has none, PPO trains one")
    return choose(ADVANTAGE_ESTIMATORS, choice, "advantage estimator", ("rewards", "all_reduce"))


def group_advantages(
    rewards: Tensor, estimator: str | AdvantageEstimator = "grpo", all_reduce: AllReduce = one_rank
) -> Tensor:
    """Advantages `[P, G]` of P prompts with G responses each, in the dtype of the floating-point `rewards` `[P, G]`.

    Under a group-relative estimator a group whose rewards are all equal gets exactly 0, whatever rounding makes of its
    mean.

    Raises:
        ValueError: G = 1 under a group-relative estimator, rewards that are not `[P, G]`, an unknown estimator, or one
            of the user's own that returns another shape or values that are not finite.

    Example:
        ``group_advantages(torch.tensor([[1.0] + [0.0] * 7]), "grpo")`` starts with 2.475: one success in 8.
    """
    estimate = advantage_estimator(estimator)
    if rewards.dim() != 2:
        raise ValueError(f"rewards must be [prompts, generations], got the shape {tuple(rewards.shape)}")
    advantages = estimate(rewards.double(), all_reduce)
    if advantages.shape != rewards.shape or not advantages.isfinite().all():
        raise ValueError(
            f"the advantage estimator {estimator!r} returned the shape {tuple(advantages.shape)}, finite:"
            f" {bool(advantages.isfinite().all())}, for rewards {tuple(rewards.shape)}: return one finite advantage per"
            " reward"
        )
    return advantages.to(rewards.dtype)


def zero_spread(rewards: Tensor) -> Tensor:
    """Whether all G rewards of a prompt are equal, bool `[P]` from `[P, G]`: such a group teaches nothing."""
    return (rewards == rewards[:, :1]).all(dim=1)


def zero_spread_fraction(rewards: Tensor) -> float:
    """Share of the P prompts of rewards `[P, G]` whose group has zero spread; nan without prompts."""
    return zero_spread(rewards).to(torch.float64).mean().item()


def _centred(rewards: Tensor) -> Tensor:
    """Return r - mean per row, exactly 0 in a row of equal rewards.

    Raises:
        ValueError: One response per prompt.
    """
    if rewards.shape[1] < 2:
        raise ValueError(
            f"the advantage compares the responses to one prompt, but num_generations is {rewards.shape[1]}: "
            "set num_generations to at least 2 (8 is usual), or choose reinforce_pp"
        )
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred.masked_fill(zero_spread(rewards)[:, None], 0.0)
