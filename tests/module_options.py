"""Flat options of a module, as tests give and override them one by one, nested as the module takes them."""

from dataclasses import fields
from typing import Any

from lightning_megatron_rl.modules.training import TrainingSettings

_TRAINING = {field.name for field in fields(TrainingSettings)}


def nested(options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` with those of `TrainingSettings` together as `train`."""
    train = TrainingSettings(**{name: value for name, value in options.items() if name in _TRAINING})
    return {"train": train, **{name: value for name, value in options.items() if name not in _TRAINING}}
