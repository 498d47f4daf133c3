"""Environments: the protocol of episodes with several turns, its guard, and a calculator."""

from lightning_megatron_rl.environments.base import (
    Action,
    Ending,
    Environment,
    EnvironmentSetupError,
    Episode,
    EpisodeSettings,
    Reply,
)
from lightning_megatron_rl.environments.calculator import Calculator, CalculatorRows
from lightning_megatron_rl.environments.guard import ContractError, GuardedEnvironment

__all__ = [
    "Action",
    "Calculator",
    "CalculatorRows",
    "ContractError",
    "Ending",
    "Environment",
    "EnvironmentSetupError",
    "Episode",
    "EpisodeSettings",
    "GuardedEnvironment",
    "Reply",
]
