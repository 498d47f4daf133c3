"""Settings as plain data; what looks like a secret does not get out."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_megatron_rl.models.layers.lora import LoRASettings
from lightning_megatron_rl.utilities.run_settings import describe_settings


@dataclass
class Foreign:
    """A dataclass of another package."""

    lr: float | None = None
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])


def length(text: str) -> float:
    return float(len(text))


class Engine:
    def __init__(self, env: dict[str, str], timeout_s: float) -> None:
        self.env, self.timeout_s, self.process = env, timeout_s, object()


class Owner:
    def __init__(self, model: Any, optimizer: Any, engine: Any, rewards: Any, rows: Any, path: Any) -> None:
        self.model, self.optimizer_config, self.engine, self.rewards = model, optimizer, engine, rewards
        self.rows, self.path, self.lora, self.state = rows, path, LoRASettings(rank=4), 3
        self.engine_owner = self  # objects may know each other


def test_settings_are_nested_plain_data():
    engine = Engine({"HF_TOKEN": "abc", "PATH": "/bin"}, 3.0)
    rewards = [length, partial(length, text="a"), torch.nn.Linear]
    owner = Owner(torch.nn.Linear(2, 2), Foreign(lr=1e-3), engine, rewards, list(range(99)), Path("runs/1"))
    found = describe_settings(owner)
    assert yaml.safe_load(yaml.safe_dump(found)) == found
    assert found == {
        "class": "tests.utilities.test_run_settings.Owner",
        "model": "torch.nn.modules.linear.Linear",
        "optimizer_config": {"lr": 1e-3},
        "engine": {
            "class": "tests.utilities.test_run_settings.Engine",
            "env": {"HF_TOKEN": "***", "PATH": "/bin"},
            "timeout_s": 3.0,
        },
        "engine_owner": "tests.utilities.test_run_settings.Owner",
        "rewards": [
            "tests.utilities.test_run_settings.length",
            {"function": "tests.utilities.test_run_settings.length", "text": "a"},
            "torch.nn.modules.linear.Linear",
        ],
        "rows": "99 items",
        "path": "runs/1",
    }
