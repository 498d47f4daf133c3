"""Environments: the protocol of episodes with several turns, its guard, and three that are built in."""

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
from lightning_megatron_rl.environments.grid import GridGame, GridRows
from lightning_megatron_rl.environments.guard import ContractError, GuardedEnvironment
from lightning_megatron_rl.environments.guessing import GuessingRows, NumberGuessing

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
    "GridGame",
    "GridRows",
    "GuardedEnvironment",
    "GuessingRows",
    "NumberGuessing",
    "Reply",
]
