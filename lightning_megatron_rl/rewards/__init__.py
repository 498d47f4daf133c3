"""Rewards: the protocol, the guard around each, the built-in ones, and how several of them score samples."""

from lightning_megatron_rl.rewards.base import (
    Reward,
    RewardSetupError,
    describe_sample,
    reward_name,
    reward_names,
)
from lightning_megatron_rl.rewards.builtin import ExactMatch, math_equal
from lightning_megatron_rl.rewards.code_tests import CodeTests
from lightning_megatron_rl.rewards.guard import GuardedReward
from lightning_megatron_rl.rewards.sandbox import Sandbox, SandboxLimits
from lightning_megatron_rl.rewards.scoring import compute_rewards
from lightning_megatron_rl.rewards.service import HTTPReward, VLLMRewardModel
from lightning_megatron_rl.rewards.text_rewards import FormatReward, JSONSchemaReward, LengthPenalty, PatternAnswer

__all__ = [
    "CodeTests",
    "ExactMatch",
    "FormatReward",
    "GuardedReward",
    "HTTPReward",
    "JSONSchemaReward",
    "LengthPenalty",
    "PatternAnswer",
    "Reward",
    "RewardSetupError",
    "Sandbox",
    "SandboxLimits",
    "VLLMRewardModel",
    "compute_rewards",
    "describe_sample",
    "math_equal",
    "reward_name",
    "reward_names",
]
