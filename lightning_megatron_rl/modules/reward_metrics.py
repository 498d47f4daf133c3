"""Metrics of the rewards' parts: their means, and how often each of them failed."""

from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.sample import Sample


def add_reward_metrics(tally: Tally, samples: list[Sample]) -> None:
    """Add the mean and the failures of each reward, and the samples on which any of them failed.

    Example:
        ``add_reward_metrics(tally, samples); tally.compute()["reward/failed_frac"]`` is 0.01 if 1 of 100 hung.
    """
    for name in samples[0].rewards:
        tally.add_mean(f"reward/{name}", [sample.rewards[name] for sample in samples])
        tally.add_mean(f"reward/{name}_failed_frac", [float(name in sample.reward_errors) for sample in samples])
    tally.add_mean("reward/failed_frac", [float(bool(sample.reward_errors)) for sample in samples])
