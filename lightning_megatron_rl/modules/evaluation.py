"""Rewards of validation samples, per data set, as metrics over all replicas."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.sample import Sample


class Evaluation:
    """Collects the samples of one validation epoch.

    Example:
        ``evaluation.add(samples); evaluation.finish("val", all_reduce)`` gives ``{"val/gsm8k/mean_at_1": 0.41, ...}``
    """

    def __init__(self) -> None:
        self._tally = Tally()
        self._names: set[str] = set()
        self.samples: list[Sample] = []  # of this replica, until the next epoch begins
        self._finished = False

    def add(self, samples: list[Sample]) -> None:
        """Take the samples of one batch, one response per prompt."""
        if self._finished:
            self.samples, self._finished = [], False
        self.samples += samples
        for sample in samples:
            values = {
                "mean_at_1": sample.reward,
                **sample.rewards,
                "truncated_frac": float(sample.is_truncated),
            }
            for name, value in values.items():
                self._tally.add_mean(f"{sample.prompt.dataset}/{name}", value)
                self._names.add(f"{sample.prompt.dataset}/{name}")

    def finish(
        self,
        stage: str,
        all_reduce: Callable[[Tensor, Literal["sum", "max"]], Tensor],
        union: Callable[[Sequence[str]], list[str]],
    ) -> dict[str, float]:
        """Return the epoch's metrics of all replicas, by ``<stage>/<set>/<metric>``, and start anew.

        Args:
            stage: "val" or "test".
            all_reduce: Reduces a vector over the replicas.
            union: Returns the names of all ranks: a replica may have had no prompt of a small set.
        """
        for name in union(sorted(self._names)):
            self._tally.add_mean(name, torch.empty(0))
        metrics = self._tally.reduce(all_reduce).compute()
        self._tally, self._names, self._finished = Tally(), set(), True
        return {f"{stage}/{name}": value for name, value in metrics.items()}
