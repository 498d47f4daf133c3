"""The critic of PPO: a Megatron model of its own with a value head, its optimizer, and its loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.data.packing import MicroBatch
from lightning_megatron_rl.utilities.ranges import COUNT_OR_NONE, POSITIVE, SHARE, check_ranges

if TYPE_CHECKING:
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.models.value_model import ValueModel
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy
    from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer

_RANGES = {
    "gamma": SHARE,
    "lam": SHARE,
    "value_clip": POSITIVE.called("null sets no bound"),
    "warmup_rollouts": COUNT_OR_NONE,
}


@dataclass
class CriticSettings:
    """How values are learnt, and what becomes of them.

    Args:
        model: Where the critic starts: a language model, which gets a new head, or a reward model with its head. None
            takes the actor's.
        init_from: Distributed checkpoint of a reward model, in any layout, whose weights and head replace those of
            `model`; that is read for its config alone then.
        gamma: Discount per token.
        lam: λ of generalised advantage estimation: 0 trusts the critic, 1 the rewards.
        value_clip: Values are drawn to the returns at most this far from the old values in one rollout; None for no
            such bound.
        whiten_advantages: Shift and scale advantages to mean 0 and standard deviation 1 over all tokens of a rollout.
        warmup_rollouts: Train the critic alone in the first so many rollouts; the actor stays as it is.

    Raises:
        ValueError: A value outside its range.
    """

    model: str | None = None
    init_from: str | None = None
    gamma: float = 1.0
    lam: float = 0.95
    value_clip: float | None = 0.2
    whiten_advantages: bool = True
    warmup_rollouts: int = 0

    def __post_init__(self) -> None:
        check_ranges(_RANGES, vars(self), "critic.")


class Critic:
    """The critic's chunks on this rank and, in a fit, their optimizer.

    Args:
        hf_model: Its Hugging Face side.
        chunks: As `ValueModel.build_chunks` made them.
    """

    def __init__(self, hf_model: "ValueModel", chunks: list[nn.Module]) -> None:
        self.hf_model = hf_model
        self.chunks = chunks
        self.optimizer: MegatronOptimizer | None = None

    def prepare_training(
        self, strategy: "MegatronStrategy", config: "OptimizerConfig", gradient_clip_val: float | None
    ) -> None:
        """Wrap the chunks as the strategy wraps the actor's, make their optimizer, and have both checkpointed."""
        from lightning_megatron_rl.strategy.wrapping import make_optimizer, wrap_for_training

        wrapped = wrap_for_training(
            self.chunks, strategy.resolve_ddp_config(), is_16bit=strategy.precision_plugin.is_16bit
        )
        self.chunks = list(wrapped)
        self.optimizer = make_optimizer(strategy.resolve_optimizer_config(config), self.chunks)
        self.optimizer.set_clip_grad(gradient_clip_val or 0.0)
        strategy.saved_with_model = {**strategy.saved_with_model, "critic": self.chunks}
        strategy.saved_beside = {**strategy.saved_beside, **self.hf_model.settings_files("hf_critic")}
        strategy.optimizers_saved_with_model = {**strategy.optimizers_saved_with_model, "critic": self.optimizer}


class ValueLoss:
    """(V - R)^2 / 2 per token, clipped around the old values; a `TokenLoss` of a model with a value head.

    max of the squared errors of V and of V clipped to V_old ± `value_clip` (Schulman et al.'s PPO code, 2017). Fields:
    "values" (of the critic before the rollout's updates) and "returns".

    Example:
        V = 1, V_old = 0, R = 1 with ``value_clip=0.2``: the clipped value is 0.2, the loss 0.32.
    """

    def __init__(self, value_clip: float | None) -> None:
        self.value_clip = value_clip

    def __call__(self, batch: MicroBatch, values: Tensor, tally: Tally) -> Tensor:
        """Return the loss of each token, ``[b, s]``."""
        old, returns, mask = batch.fields["values"], batch.fields["returns"], batch.mask
        values = torch.where(mask, values, old)  # masked positions may hold anything
        squares = (values - returns).square()
        if self.value_clip is None:
            return 0.5 * squares
        clipped = (old + (values - old).clamp(-self.value_clip, self.value_clip) - returns).square()
        tally.add_mean("critic/clip_frac", (clipped > squares).double(), mask)
        return 0.5 * torch.maximum(squares, clipped)


def token_rewards(
    rewards: Tensor,
    masks: Sequence[Tensor],
    penalties: Sequence[Tensor] = (),
    of_turns: Sequence[dict[int, float]] = (),
) -> list[Tensor]:
    """Return each sample's reward on the last token that counts, float64 ``[tokens]``; nothing where none counts.

    The parts of the reward that were given for earlier turns of an episode stand on the last tokens of these.

    Args:
        rewards: ``[samples]``.
        masks: Per sample, which tokens count.
        penalties: Per sample, what is added to each token's; nothing if empty.
        of_turns: Per sample, the part of its reward that was given for a turn, by the turn's last token.

    Example:
        ``token_rewards(torch.tensor([2.0]), [torch.tensor([False, True, True])])`` is [[0, 0, 2]].
    """
    placed = []
    for number, mask in enumerate(masks):
        row = penalties[number].clone() if penalties else torch.zeros(len(mask), dtype=torch.float64)
        counted = mask.nonzero()
        if len(counted):
            row[counted[-1]] += rewards[number]
            for token, part in of_turns[number].items() if of_turns else ():
                row[token] += part
                row[counted[-1]] -= part
        placed.append(row)
    return placed


def add_value_metrics(tally: Tally, values: Tensor, returns: Tensor, mask: Tensor) -> None:
    """Add `critic/explained_var`, `critic/value_mean` and `critic/return_mean` of one sequence, ``[tokens]`` each.

    Explained variance is 1 - Var(R - V) / Var(R) over all tokens; nan if returns do not vary.
    """
    v, r = values[mask].double(), returns[mask].double()
    error = r - v
    sums: dict[str, Any] = {
        "count": torch.tensor(float(len(r))),
        "r": r.sum(),
        "rr": r.square().sum(),
        "e": error.sum(),
        "ee": error.square().sum(),
    }
    tally.add("critic/explained_var", _explained_variance, sums)
    tally.add_mean("critic/value_mean", v)
    tally.add_mean("critic/return_mean", r)


def _explained_variance(count: float, r: float, rr: float, e: float, ee: float) -> float:
    if not count:
        return math.nan
    of_returns, of_errors = rr / count - (r / count) ** 2, ee / count - (e / count) ** 2
    # rounding of the difference of squares would make a spread of equal returns
    return 1 - of_errors / of_returns if of_returns > 1e-12 * rr / count else math.nan
