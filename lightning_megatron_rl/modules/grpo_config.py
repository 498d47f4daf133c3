"""`GRPOLossConfig`: everything that shapes the GRPO objective, with contradictions refused."""

import inspect
from dataclasses import dataclass
from typing import Any, Literal

from lightning_megatron_rl.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageEstimator, advantage_estimator
from lightning_megatron_rl.algorithms.aggregation import AGGREGATIONS, Aggregation, aggregation
from lightning_megatron_rl.algorithms.correction import CORRECTIONS, Correction, correction
from lightning_megatron_rl.algorithms.kl import KL_ESTIMATORS, KLEstimator, kl_estimator
from lightning_megatron_rl.algorithms.policy_losses import (
    POLICY_LOSSES,
    SEQUENCE_LOSSES,
    PolicyLoss,
    check_vespo,
    gspo,
    luspo,
    policy_loss,
    vespo,
)
from lightning_megatron_rl.algorithms.registry import by_name
from lightning_megatron_rl.algorithms.schedules import LinearSchedule
from lightning_megatron_rl.utilities.ranges import (
    FINITE,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    Range,
    check_ranges,
    check_words,
)

KLPlace = Literal["loss", "reward"]

# what each loss and correction is called with, by its own argument: the setting that holds it
_POLICY_LOSS_OPTIONS = {
    "ppo_clip": {"clip_low": "clip_low", "clip_high": "clip_high", "dual_clip": "dual_clip"},
    "gspo": {"clip_low": "clip_low", "clip_high": "clip_high"},
    "luspo": {"clip_low": "clip_low", "clip_high": "clip_high"},
    "vespo": {name: f"vespo_{name}" for name in ("k_positive", "lambda_positive", "k_negative", "lambda_negative")},
    "cispo": {"clip_high": "clip_high"},
    "sapo": {"tau_positive": "sapo_tau_positive", "tau_negative": "sapo_tau_negative"},
}
_CLIPS = ("clip_low", "clip_high")
_USUAL_CLIP = 0.2
_CORRECTION_OPTIONS = {
    "tis": {"level": "correction_level", "cap": "correction_cap"},
    "icepop": {"level": "correction_level", "low": "icepop_low", "high": "icepop_high"},
    "geo_mask": {"low": "geo_mask_low", "high": "geo_mask_high"},
}
# the aggregation under which the token form of a sequence's loss adds up to that loss
_SEQUENCE_AGGREGATIONS: dict[str, tuple[PolicyLoss, str]] = {
    "gspo": (gspo, "seq_mean_token_mean"),
    "luspo": (luspo, "seq_mean_token_sum"),
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
    "vespo_k_positive": NOT_NEGATIVE,
    "vespo_k_negative": NOT_NEGATIVE,
    "vespo_lambda_positive": POSITIVE,
    "vespo_lambda_negative": POSITIVE,
    "off_policy_mask_threshold": POSITIVE.called(
        "it is a mean of log π_roll - log π_θ in nats; 0.5 is usual, null for no mask"
    ),
    "top_entropy_quantile": Range(
        least=0, most=1, note="it is a share of the tokens; 0 keeps the largest entropy alone, 1 all, 0.2 is usual"
    ),
}


@dataclass
class GRPOLossConfig:
    """Everything that shapes the objective; formulas in docs/algorithms.md.

    Wherever a name is expected, the dotted path of a function or a class_path with init_args does as well; the Protocol
    that it has to follow stands beside the functions of that kind.

    Args:
        advantage: "grpo", "dr_grpo", "rloo", "reinforce_pp" or "reinforce_pp_baseline".
        policy_loss: "ppo_clip", "gspo", "luspo", "vespo", "cispo" or "sapo".
        aggregation: How token losses become one number; denominators are global.
        clip_low: The ratio is clipped below at 1 - clip_low. None takes what is usual for the policy loss: 0.2 for
            ppo_clip, 3e-4 for gspo, 2e-3 for luspo.
        clip_high: The ratio is clipped above at 1 + clip_high. None: 0.2 for ppo_clip, 4e-4 for gspo, 2.5e-3 for luspo,
            4 for cispo.
        dual_clip: Bound of the loss at negative advantages, a multiple of the advantage; None for no bound (ppo_clip).
        sapo_tau_positive: Temperature of sapo's gate where the advantage is positive.
        sapo_tau_negative: Temperature of sapo's gate where it is not.
        vespo_k_positive: How steeply vespo's weight falls for ratios below 1, where the advantage is not negative.
        vespo_lambda_positive: The same for ratios above 1.
        vespo_k_negative: As vespo_k_positive, where the advantage is negative.
        vespo_lambda_negative: As vespo_lambda_positive, where the advantage is negative.
        off_policy_mask_threshold: Leave sequences with a negative advantage out of the policy loss if the mean of
            log π_roll - log π_θ over their tokens is larger (0.5 is usual); None for no such mask.
        top_entropy_quantile: Share of the update's tokens, those with the largest entropy under the old policy, that
            have a policy loss and an entropy bonus (0.2 is usual); 1 for all.
        kl_coef: Weight of the KL divergence to the reference; 0 means that no reference is built.
        kl_estimator: "k1", "k2" or "k3"; k3 is at most 10, and a token there has no gradient (`policy/kl_capped_frac`).
        kl_in: Added to the loss of each token, or subtracted from the reward of each sample, summed over its tokens.
        kl_importance_weighting: Weight each token's KL in the loss with its ratio, which is unbiased off policy.
        entropy_coef: Weight of the entropy bonus.
        entropy_schedule: Lets entropy_coef change in a straight line; None keeps it.
        correction: What is done about a sampler that is not the trainer: "tis", "icepop" or "geo_mask"; None trusts it.
        correction_level: tis and icepop: one weight per "token", or one per "sequence". None takes the sequence for
            gspo and luspo, whose loss is of sequences, otherwise the token.
        correction_cap: tis: upper bound of the weight.
        icepop_low: icepop: tokens (or sequences) with a smaller weight are rejected.
        icepop_high: icepop: tokens (or sequences) with a larger weight are rejected.
        geo_mask_low: geo_mask: sequences with a smaller geometric mean of the weights are rejected.
        geo_mask_high: geo_mask: sequences with a larger one are rejected.
        bypass: Take the sampler's log-probs for those of the old policy, which saves a pass where there is one.

    Raises:
        ValueError: A value outside its range, an unknown name with those that exist, or settings that contradict.
    """

    advantage: str | AdvantageEstimator = "grpo"
    policy_loss: str | PolicyLoss = "ppo_clip"
    aggregation: str | Aggregation = "token_mean"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = 3.0
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05
    vespo_k_positive: float = 2.0
    vespo_lambda_positive: float = 3.0
    vespo_k_negative: float = 3.0
    vespo_lambda_negative: float = 2.0
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    kl_coef: float = 0.0
    kl_estimator: str | KLEstimator = "k3"
    kl_in: KLPlace = "loss"
    kl_importance_weighting: bool = False
    entropy_coef: float = 0.0
    entropy_schedule: LinearSchedule | None = None
    correction: str | Correction | None = "tis"
    correction_level: Literal["token", "sequence"] | None = None
    correction_cap: float = 2.0
    icepop_low: float = 0.5
    icepop_high: float = 5.0
    geo_mask_low: float = 0.99
    geo_mask_high: float = 1.01
    bypass: bool = False

    def __post_init__(self) -> None:
        # a shipped function is what its name is: it has the settings of that, a user's own has its own defaults
        self.advantage = by_name(ADVANTAGE_ESTIMATORS, self.advantage, advantage_estimator(self.advantage))
        self.policy_loss = by_name(POLICY_LOSSES, self.policy_loss, policy_loss(self.policy_loss))
        self.aggregation = by_name(AGGREGATIONS, self.aggregation, aggregation(self.aggregation))
        self.kl_estimator = by_name(KL_ESTIMATORS, self.kl_estimator, kl_estimator(self.kl_estimator))
        if self.correction is not None:
            self.correction = by_name(CORRECTIONS, self.correction, correction(self.correction))
        self._check_ranges()
        self._check_contradictions()

    def policy_loss_options(self) -> dict[str, Any]:
        """Return the arguments that `policy_loss` takes beside the tensors; a user's own has its own defaults."""
        options = self._options(_POLICY_LOSS_OPTIONS, self.policy_loss)
        return {name: value for name, value in options.items() if name not in _CLIPS or value is not None}

    @property
    def clip_range(self) -> tuple[float, float]:
        """How much less and more than 1 the ratio may be; for a loss that does not clip there, as for ppo_clip."""
        return self._clip("clip_low"), self._clip("clip_high")

    def _clip(self, name: str) -> float:
        given: float | None = getattr(self, name)
        if given is not None:
            return given
        parameter = inspect.signature(policy_loss(self.policy_loss)).parameters.get(name)
        usual = None if parameter is None else parameter.default
        return usual if isinstance(usual, float) else _USUAL_CLIP

    def correction_options(self) -> dict[str, Any]:
        """Return the arguments that `correction` takes beside the tensors; a user's own has its own defaults."""
        options = self._options(_CORRECTION_OPTIONS, self.correction)
        return {**options, "level": self.weight_level} if "level" in options else options

    @property
    def weight_level(self) -> Literal["token", "sequence"]:
        """Whether the correction gives each token a weight of its own, or a sequence one weight."""
        if "level" not in self._options(_CORRECTION_OPTIONS, self.correction):
            return "token"  # of geo_mask, whose weights are 0 and 1, either is the same
        if self.correction_level is not None:
            return self.correction_level
        return "sequence" if self.weighs_sequences else "token"

    @property
    def weighs_sequences(self) -> bool:
        """Whether the policy loss is the token form of a loss of whole sequences."""
        return policy_loss(self.policy_loss) in SEQUENCE_LOSSES

    @property
    def corrects_rows(self) -> bool:
        """Whether the correction is a user's own, which has to see each sequence as one row."""
        choice = self.correction
        return choice is not None and not (isinstance(choice, str) and choice in _CORRECTION_OPTIONS)

    @property
    def corrects_within_loss(self) -> bool:
        """Whether the policy loss takes the correction's weights as an argument; others are multiplied by them."""
        return policy_loss(self.policy_loss) is vespo

    def describe(self, advantage: str | None = None) -> list[tuple[str, str]]:
        """Return rows for the table at start: what the objective is made of.

        Args:
            advantage: Where it is not the one of these settings.
        """
        choices = (advantage or self.advantage, self.policy_loss)
        names = [choice if isinstance(choice, str) else _name(choice) for choice in choices]
        mode = self.aggregation if isinstance(self.aggregation, str) else _name(self.aggregation)
        sampler = "bypass" if self.bypass else "none" if self.correction is None else self.correction
        sampler = sampler if isinstance(sampler, str) else _name(sampler)
        if "level" in self._options(_CORRECTION_OPTIONS, self.correction):
            sampler += f", per {self.weight_level}"
        rows = [
            ("advantage, loss, aggregation", ", ".join([*names, mode])),
            ("correction of the mismatch", sampler),
        ]
        if self.off_policy_mask_threshold is not None:
            rows.append(("off-policy mask", f"mean log-ratio > {self.off_policy_mask_threshold:g}, negative advantage"))
        if self.top_entropy_quantile < 1:
            rows.append(("tokens with a policy loss", f"top {self.top_entropy_quantile:g} of the update by entropy"))
        if self.kl_coef:
            kl = self.kl_estimator if isinstance(self.kl_estimator, str) else _name(self.kl_estimator)
            rows.append(("KL", f"{self.kl_coef:g} x {kl} in the {self.kl_in}"))
        return rows

    def _options(self, options: dict[str, dict[str, str]], choice: Any) -> dict[str, Any]:
        names = options.get(choice, {}) if isinstance(choice, str) else {}
        return {argument: getattr(self, setting) for argument, setting in names.items()}

    def _check_ranges(self) -> None:
        check_ranges(_RANGES, vars(self), "loss.")
        check_words({"kl_in": KLPlace}, vars(self), "loss.")
        for sign in ("positive", "negative"):
            check_vespo(**{name: getattr(self, name) for name in (f"vespo_k_{sign}", f"vespo_lambda_{sign}")})
        for name in ("icepop", "geo_mask"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if not 0 <= low < 1 < high:
                raise ValueError(f"{name}_low={low} and {name}_high={high}: weights of 1 must lie between them.")

    def _check_contradictions(self) -> None:
        for name, (loss, mode) in _SEQUENCE_AGGREGATIONS.items():
            if policy_loss(self.policy_loss) is loss and self.aggregation != mode:
                raise ValueError(
                    f"policy_loss={name} with aggregation={self.aggregation}: one ratio per sequence makes one loss per"
                    f" sequence, and its token form adds up to that under {mode} only. Set aggregation={mode}, or"
                    " another policy_loss."
                )
        if self.bypass and self.top_entropy_quantile < 1:
            raise ValueError(
                f"bypass=true with top_entropy_quantile={self.top_entropy_quantile}: entropies come from the pass that"
                " scores the rollout under the old policy, which bypass leaves out. Set bypass=false, or"
                " top_entropy_quantile=1."
            )
        if self.bypass and self.correction is not None:
            raise ValueError(
                f"bypass=true with correction={self.correction}: with the sampler's log-probs as the old policy's, the"
                " ratio of the policy loss corrects for the sampler already, and a second weight would correct twice."
                " Set correction=null, or bypass=false."
            )
        if self.correction_level not in (None, "token", "sequence"):
            raise ValueError(
                f"correction_level={self.correction_level!r}: choose one of sequence, token, or null for that of the"
                " policy loss."
            )
        if self.correction_level == "sequence" and self.correction not in ("tis", "icepop"):
            raise ValueError(
                f"correction_level=sequence with correction={self.correction}: only tis and icepop have a weight per"
                " sequence. Set one of them, or leave correction_level out."
            )
        if self.correction_level == "sequence" and self.corrects_within_loss:
            raise ValueError(
                "correction_level=sequence with policy_loss=vespo, which makes one weight of a sequence's tokens by"
                " itself: leave correction_level out."
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
