"""The real command line inside the test process: everything is parsed and built, nothing is run."""

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from lightning_megatron_rl.cli import CommandLine

ROOT = Path(__file__).resolve().parents[1]


class Built(CommandLine):
    """Builds Trainer, module and data module, and leaves it at that."""

    config_dump: dict[str, Any] = {}  # noqa: RUF012  of `save_hyperparameters`; to write it takes a third of the time

    def fit(self, **_: Any) -> None:
        """Do not train."""

    def check_stages(self) -> None:
        """What is only built needs no model of an earlier stage."""

    def validate(self, **_: Any) -> None:
        """Do not validate."""


def build(*args: str | Path, **environment: str) -> Built:
    """Build what the command line `args` names; `seed_everything` leaves environment variables, which go again."""
    with patch.dict(os.environ, environment), patch.object(sys, "argv", ["lightning-megatron-rl"]):
        return Built([str(argument) for argument in args])


def changed(source: Path, target: Path, key: str, value: Any) -> Path:
    """Write the YAML file `source` to `target` with the value of one dotted key, which may be new, changed."""
    config = yaml.safe_load(source.read_text())
    *parents, last = key.split(".")
    owner = config
    for part in parents:
        owner = owner[int(part)] if part.isdigit() else owner[part]
    owner[last] = value
    target.write_text(yaml.safe_dump(config))
    return target
