"""Pure tensor maths of policy optimisation: knows neither Megatron nor Lightning nor the sampler."""

from lightning_megatron_rl.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    group_advantages,
    zero_spread,
    zero_spread_fraction,
)
from lightning_megatron_rl.algorithms.aggregation import AGGREGATIONS, sequence_weights, weighted_sum
from lightning_megatron_rl.algorithms.correction import truncated_importance_weights
from lightning_megatron_rl.algorithms.kl import KL_ESTIMATORS, kl_penalty
from lightning_megatron_rl.algorithms.metrics import add_mismatch_metrics, add_policy_metrics
from lightning_megatron_rl.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, clip_masks, policy_loss, ppo_clip
from lightning_megatron_rl.algorithms.tally import Tally

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "PolicyLoss",
    "Tally",
    "add_mismatch_metrics",
    "add_policy_metrics",
    "clip_masks",
    "group_advantages",
    "kl_penalty",
    "policy_loss",
    "ppo_clip",
    "sequence_weights",
    "truncated_importance_weights",
    "weighted_sum",
    "zero_spread",
    "zero_spread_fraction",
]
