"""`GRPOLossConfig`: everything that shapes the GRPO objective, with contradictions refused."""

import inspect
from dataclasses import dataclass
from typing import Any, Literal

from lightning_megatron_rl.algorithms.advantages import AdvantageEstimator, advantage_estimator
from lightning_megatron_rl.algorithms.aggregation import Aggregation, aggregation
from lightning_megatron_rl.algorithms.correction import Correction, correction
from lightning_megatron_rl.algorithms.kl import KLEstimator, kl_estimator
from lightning_megatron_rl.algorithms.policy_losses import PolicyLoss, gspo, policy_loss
from lightning_megatron_rl.algorithms.schedules import LinearSchedule
from lightning_megatron_rl.ranges import FINITE, NOT_NEGATIVE, POSITIVE, PROBABILITY, Range, check_ranges

# what each loss and correction is called with, by its own argument: the setting that holds it
_POLICY_LOSS_OPTIONS = {
    "ppo_clip": {"clip_low": "clip_low", "clip_high": "clip_high", "dual_clip": "dual_clip"},
    "gspo": {"clip_low": "clip_low", "clip_high": "clip_high"},
    "cispo": {"clip_high": "clip_high"},
    "sapo": {"tau_positive": "sapo_tau_positive", "tau_negative": "sapo_tau_negative"},
}
_CORRECTION_OPTIONS = {
    "tis": {"level": "correction_level", "cap": "correction_cap"},
    "icepop": {"low": "icepop_low", "high": "icepop_high"},
    "geo_mask": {"low": "geo_mask_low", "high": "geo_mask_high"},
}
_RANGES = {
    "clip_low": PROBABILITY.called("the lower bound 1 - clip_low of the ratio must be positive"),
    "clip_high": NOT_NEGATIVE,
    "dual_clip": Range(above=1, note="3 is usual, null sets no bound"),
    "sapo_tau_positive": POSITIVE,
    "sapo_tau_negative": POSITIVE,
    "kl_coef": NOT_NEGATIVE,
    "entropy_coef": FINITE,
    "correction_cap": POSITIVE,
    "icepop_low": NOT_NEGATIVE,
    "icepop_high": POSITIVE,
    "geo_mask_low": NOT_NEGATIVE,
    "geo_mask_high": POSITIVE,
}


@dataclass
class GRPOLossConfig:
    """Everything that shapes the objective; formulas in docs/algorithms.md.

    Wherever a name is expected, the dotted path of a function or a class_path with init_args does as well; the Protocol
    that it has to follow stands beside the functions of that kind.

    Args:
        advantage: "grpo", "dr_grpo", "rloo", "reinforce_pp" or "reinforce_pp_baseline".
        policy_loss: "ppo_clip", "gspo", "cispo" or "sapo".
        aggregation: How token losses become one number; denominators are global.
        clip_low: The ratio is clipped below at 1 - clip_low (ppo_clip, gspo).
        clip_high: The ratio is clipped above at 1 + clip_high (ppo_clip, gspo, cispo).
        dual_clip: Bound of the loss at negative advantages, a multiple of the advantage; None for no bound (ppo_clip).
        sapo_tau_positive: Temperature of sapo's gate where the advantage is positive.
        sapo_tau_negative: Temperature of sapo's gate where it is not.
        kl_coef: Weight of the KL divergence to the reference; 0 means that no reference is built.
        kl_estimator: "k1", "k2" or "k3".
        kl_in: Added to the loss of each token, or subtracted from the reward of each sample, summed over its tokens.
        kl_importance_weighting: Weight each token's KL in the loss with its ratio, which is unbiased off policy.
        entropy_coef: Weight of the entropy bonus.
        entropy_schedule: Lets entropy_coef change in a straight line; None keeps it.
        correction: What is done about a sampler that is not the trainer: "tis", "icepop" or "geo_mask"; None trusts it.
        correction_level: tis: one weight per token, or one per sequence.
        correction_cap: tis: upper bound of the weight.
        icepop_low: icepop: tokens with a smaller weight are rejected.
        icepop_high: icepop: tokens with a larger weight are rejected.
        geo_mask_low: geo_mask: sequences with a smaller geometric mean of the weights are rejected.
        geo_mask_high: geo_mask: sequences with a larger one are rejected.
        bypass: Take the sampler's log-probs for those of the old policy, which saves the pass that computes them.

    Raises:
        ValueError: A value outside its range, an unknown name with those that exist, or settings that contradict.

    Example:
        ``GRPOLossConfig(policy_loss="gspo", aggregation="seq_mean_token_mean", clip_low=3e-4, clip_high=4e-4)``
    """

    advantage: str | AdvantageEstimator = "grpo"
    policy_loss: str | PolicyLoss = "ppo_clip"
    aggregation: str | Aggregation = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05
    kl_coef: float = 0.0
    kl_estimator: str | KLEstimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_importance_weighting: bool = False
    entropy_coef: float = 0.0
    entropy_schedule: LinearSchedule | None = None
    correction: str | Correction | None = "tis"
    correction_level: Literal["token", "sequence"] = "token"
    correction_cap: float = 2.0
    icepop_low: float = 0.5
    icepop_high: float = 5.0
    geo_mask_low: float = 0.99
    geo_mask_high: float = 1.01
    bypass: bool = False

    def __post_init__(self) -> None:
        advantage_estimator(self.advantage)
        policy_loss(self.policy_loss)
        aggregation(self.aggregation)
        kl_estimator(self.kl_estimator)
        if self.correction is not None:
            correction(self.correction)
        self._check_ranges()
        self._check_contradictions()

    def policy_loss_options(self) -> dict[str, Any]:
        """Return the arguments that `policy_loss` takes beside the tensors; a user's own has its own defaults."""
        return self._options(_POLICY_LOSS_OPTIONS, self.policy_loss)

    def correction_options(self) -> dict[str, Any]:
        """Return the arguments that `correction` takes beside the tensors; a user's own has its own defaults."""
        return self._options(_CORRECTION_OPTIONS, self.correction)

    def describe(self) -> list[tuple[str, str]]:
        """Return rows for the table at start: what the objective is made of."""
        names = [choice if isinstance(choice, str) else _name(choice) for choice in (self.advantage, self.policy_loss)]
        mode = self.aggregation if isinstance(self.aggregation, str) else _name(self.aggregation)
        sampler = "bypass" if self.bypass else "none" if self.correction is None else self.correction
        rows = [
            ("advantage, loss, aggregation", ", ".join([*names, mode])),
            ("correction of the mismatch", sampler if isinstance(sampler, str) else _name(sampler)),
        ]
        if self.kl_coef:
            kl = self.kl_estimator if isinstance(self.kl_estimator, str) else _name(self.kl_estimator)
            rows.append(("KL", f"{self.kl_coef:g} x {kl} in the {self.kl_in}"))
        return rows

    def _options(self, options: dict[str, dict[str, str]], choice: Any) -> dict[str, Any]:
        names = options.get(choice, {}) if isinstance(choice, str) else {}
        return {argument: getattr(self, setting) for argument, setting in names.items()}

    def _check_ranges(self) -> None:
        check_ranges(_RANGES, vars(self), "loss.")
        for name in ("icepop", "geo_mask"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if not 0 <= low < 1 < high:
                raise ValueError(f"{name}_low={low} and {name}_high={high}: weights of 1 must lie between them.")

    def _check_contradictions(self) -> None:
        if policy_loss(self.policy_loss) is gspo and self.aggregation != "seq_mean_token_mean":
            raise ValueError(
                f"policy_loss=gspo with aggregation={self.aggregation}: one ratio per sequence makes one loss per"
                " sequence, and its token form adds up to that under seq_mean_token_mean only. Set"
                " aggregation=seq_mean_token_mean, or another policy_loss."
            )
        if self.bypass and self.correction is not None:
            raise ValueError(
                f"bypass=true with correction={self.correction}: with the sampler's log-probs as the old policy's, the"
                " ratio of the policy loss corrects for the sampler already, and a second weight would correct twice."
                " Set correction=null, or bypass=false."
            )
        if self.correction_level == "sequence" and self.correction != "tis":
            raise ValueError(
                f"correction_level=sequence with correction={self.correction}: only tis has a weight per sequence."
                " Set correction=tis, or correction_level=token."
            )
        if self.kl_importance_weighting and (not self.kl_coef or self.kl_in == "reward"):
            raise ValueError(
                f"kl_importance_weighting=true with kl_coef={self.kl_coef} and kl_in={self.kl_in}: it weights the KL in"
                " the loss, of which there is none. Set kl_coef > 0 and kl_in=loss, or kl_importance_weighting=false."
            )
        if self.entropy_schedule is not None and self.entropy_schedule.final == self.entropy_coef:
            raise ValueError(
                f"entropy_schedule ends at final={self.entropy_schedule.final}, where entropy_coef begins: set"
                " entropy_coef to the value at the start, or leave the schedule out."
            )


def _name(choice: Any) -> str:
    return choice.__name__ if inspect.isroutine(choice) else type(choice).__name__
