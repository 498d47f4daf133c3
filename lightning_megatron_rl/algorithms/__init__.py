"""Pure tensor maths of policy optimisation: knows neither Megatron nor Lightning nor the sampler."""

from lightning_megatron_rl.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    group_advantages,
    zero_spread,
    zero_spread_fraction,
)
from lightning_megatron_rl.algorithms.aggregation import AGGREGATIONS, Aggregation, sequence_weights, weighted_sum
from lightning_megatron_rl.algorithms.correction import (
    CORRECTIONS,
    Correction,
    geometric_mask,
    icepop_weights,
    truncated_importance_weights,
)
from lightning_megatron_rl.algorithms.gae import gae
from lightning_megatron_rl.algorithms.kl import KL_ESTIMATORS, KLEstimator, k3_capped, kl_penalty
from lightning_megatron_rl.algorithms.masks import off_policy_mask, top_entropy_mask
from lightning_megatron_rl.algorithms.metrics import add_mismatch_metrics, add_policy_metrics
from lightning_megatron_rl.algorithms.overlong import overlong_penalty
from lightning_megatron_rl.algorithms.policy_losses import (
    POLICY_LOSSES,
    PolicyLoss,
    cispo,
    clip_masks,
    gspo,
    luspo,
    policy_loss,
    ppo_clip,
    sapo,
    vespo,
)
from lightning_megatron_rl.algorithms.schedules import LinearSchedule
from lightning_megatron_rl.algorithms.sequences import Sequences
from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.algorithms.whitening import whiten

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AGGREGATIONS",
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "AdvantageEstimator",
    "Aggregation",
    "Correction",
    "KLEstimator",
    "LinearSchedule",
    "PolicyLoss",
    "Sequences",
    "Tally",
    "add_mismatch_metrics",
    "add_policy_metrics",
    "cispo",
    "clip_masks",
    "gae",
    "geometric_mask",
    "group_advantages",
    "gspo",
    "icepop_weights",
    "k3_capped",
    "kl_penalty",
    "luspo",
    "off_policy_mask",
    "overlong_penalty",
    "policy_loss",
    "ppo_clip",
    "sapo",
    "sequence_weights",
    "top_entropy_mask",
    "truncated_importance_weights",
    "vespo",
    "weighted_sum",
    "whiten",
    "zero_spread",
    "zero_spread_fraction",
]
