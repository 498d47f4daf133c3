"""Rewards: the protocol, the built-in ones, and how several of them score samples."""

from lightning_megatron_rl.rewards.base import Reward, compute_rewards, describe_sample, reward_name, reward_names
from lightning_megatron_rl.rewards.builtin import ExactMatch, FormatReward, math_equal

__all__ = [
    "ExactMatch",
    "FormatReward",
    "Reward",
    "compute_rewards",
    "describe_sample",
    "math_equal",
    "reward_name",
    "reward_names",
]
