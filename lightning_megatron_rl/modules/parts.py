"""An update in parts: each is computed when its sequences are there, and all of them make one optimizer step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.models.families.registry import num_experts
from lightning_megatron_rl.modules.sharing import Share
from lightning_megatron_rl.strategy.schedule import GradientSum

if TYPE_CHECKING:
    from lightning_megatron_rl.modules.grpo import GRPOModule

BY_TOKENS = "token_mean"
"""The aggregation that weighs parts by their tokens."""
BY_PARTS = ("seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "prompt_mean")
"""Those whose denominators are as large for each part: sequences, prompts."""
WITHIN_GROUPS = ("grpo", "dr_grpo", "rloo")
"""Advantages that are known when a group is."""


class UpdateParts:
    """What the parts of an update add up to: gradients, metrics, and which samples they are of.

    Args:
        device: Of the tally.
        count: Parts, each of as many sequences and prompts.
        by_tokens: Whether each counts by its tokens (the mean over all tokens), or each as much as another.
    """

    def __init__(self, device: torch.device, count: int = 1, *, by_tokens: bool = True) -> None:
        self.gradients = GradientSum(is_last=count == 1)
        self.tally: Tally | None = None  # only the last pipeline stage has one
        self.samples: list[dict[str, Any]] = []
        self.token_losses: list[tuple[Tensor, Tensor]] = []
        self._device = device
        self._count, self._by_tokens = count, by_tokens
        self._number = 0
        self._first_tokens = 0.0  # of the first part that has any
        self._tokens = 0.0  # of all parts, that the loss sums over
        self._num_tokens = self._num_positions = 0
        self._work: list[float] = []

    def weigh(self, num_tokens: float) -> float:
        """Begin a part; return what the weights of its tokens are multiplied by, made as if it were the whole update.

        Their sum over a part is its number of tokens, so that parts of more tokens count for more. Where each counts
        as much, all are brought to the number of the first one, and that is taken out of the whole in the end.

        Args:
            num_tokens: That the loss sums over, of all replicas.
        """
        self._number += 1
        self._tokens += num_tokens
        self._first_tokens = self._first_tokens or num_tokens
        self.gradients.is_last = self._number == self._count
        if self._by_tokens or not num_tokens:
            return 1.0
        self.gradients.scale = self._tokens / (self._first_tokens * self._count)
        return self._first_tokens / num_tokens

    def add(self, share: Share, tallies: Sequence[Tally], token_losses: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add the results of a part."""
        place = len(self.samples)
        self.samples += share.describe_samples()
        self.token_losses += [(losses, torch.where(index >= 0, index + place, index)) for losses, index in token_losses]
        for tally in tallies:
            self.tally = self.tally or Tally(self._device)
            self.tally.merge(tally)
        self._num_tokens += share.num_tokens
        self._num_positions += share.num_positions
        self._work = [sum(both) for both in zip(self._work or [0.0] * len(share.work), share.work, strict=True)]

    def metrics(self) -> dict[str, float]:
        """Return the share of all positions that hold padding, and the work of the busiest replica over the mean."""
        mean = sum(self._work) / len(self._work)
        return {
            "perf/padding_frac": 1 - self._num_tokens / self._num_positions,
            "perf/imbalance": max(self._work) / mean if mean else 1.0,
        }


def check_parts(module: "GRPOModule", parts: int) -> None:
    """Refuse what an update in parts would make another update of.

    Raises:
        ValueError: With what would have to be known of the whole batch, and the remedy.
    """
    name, config = f"streaming.batch_parts={parts}", module.loss.config
    remedy = "Set batch_parts=1."
    data = module.trainer.datamodule  # type: ignore[attr-defined]
    replicas = module.strategy.layout.data_parallel_size(module.trainer.world_size)
    prompts = data.batch_size // replicas
    if prompts % parts:
        raise ValueError(
            f"{name} does not divide the {prompts} prompts of one replica (batch_size / data-parallel size):"
            f" {prompts} / {parts} = {prompts / parts:.2f}. Change batch_size or batch_parts."
        )
    if not module.compares_groups:
        raise ValueError(f"{name} with {type(module).__name__}, whose critic judges the whole batch first. {remedy}")
    if reasons := module.scored_first_for():
        raise ValueError(f"{name} with {', '.join(reasons)}: the whole batch is scored before its update. {remedy}")
    if config.advantage not in WITHIN_GROUPS:
        raise ValueError(
            f"{name} with loss.advantage={config.advantage!r}, which compares a group with the whole batch: choose one"
            f" of {', '.join(WITHIN_GROUPS)}, or batch_parts=1."
        )
    if config.aggregation not in (BY_TOKENS, *BY_PARTS):
        raise ValueError(
            f"{name} with loss.aggregation={config.aggregation!r}, whose weights of a part are not known: choose one of"
            f" {', '.join((BY_TOKENS, *BY_PARTS))}, or batch_parts=1."
        )
    if (experts := num_experts(module.hf_model.config)) > 1:
        raise ValueError(
            f"{name} with a mixture of {experts} experts, whose balance loss is weighed by the tokens of the whole"
            f" batch. {remedy}"
        )
