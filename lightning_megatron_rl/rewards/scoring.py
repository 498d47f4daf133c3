"""Scores samples by several rewards in parallel, each guarded, and sums them with weights."""

from collections.abc import Callable, Sequence
from functools import partial

from lightning_megatron_rl.rewards.base import Reward, reward_names
from lightning_megatron_rl.rewards.deadline import DaemonPool
from lightning_megatron_rl.rewards.guard import guarded
from lightning_megatron_rl.sample import Sample


def compute_rewards(samples: list[Sample], rewards: Sequence[Reward], weights: Sequence[float] | None = None) -> None:
    """Fill `rewards` (each one by name, unweighted) and `reward` (their weighted sum, weights 1 by default) of samples.

    A reward that fails on a sample costs it the default, and `reward_errors` says why (see `GuardedReward`). The
    samples stay as they are if anything raises. The rewards run at the same time.

    Raises:
        ValueError: rewards and weights that `reward_names` refuses; a result that is not a list with one number per
            sample; what a reward needs is not there.
        RuntimeError: a reward with ``on_error="raise"`` failed, with the sample that it failed on.
    """
    names = reward_names(rewards, weights)
    if not samples:
        return
    guards = [guarded(reward) for reward in rewards]
    results = _at_once([partial(guard.score, samples) for guard in guards])
    factors = weights or [1.0] * len(names)
    for index, sample in enumerate(samples):
        sample.rewards = {name: scores[index] for name, (scores, _) in zip(names, results, strict=True)}
        sample.reward = sum(factor * part for factor, part in zip(factors, sample.rewards.values(), strict=True))
        sample.reward_errors = {
            name: errors[index] for name, (_, errors) in zip(names, results, strict=True) if index in errors
        }


def _at_once[T](calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of calls that run at the same time, or raise the first one's exception.

    Ctrl-C is answered at once, whatever hangs.
    """
    pool = DaemonPool("rewards", len(calls))
    try:
        return [future.result() for future in [pool.submit(call) for call in calls]]
    finally:
        pool.close()
