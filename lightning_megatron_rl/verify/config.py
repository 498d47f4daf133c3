"""Builds what `verify-layout` trains from the YAML files of `fit`."""

import logging
import os
import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningCLI

from lightning_megatron_rl.cli import CommandLine
from lightning_megatron_rl.strategy.megatron import MegatronStrategy
from lightning_megatron_rl.verify.job import Subject

_KEPT = ("gradient_clip_val", "gradient_clip_algorithm")  # settings of the Trainer that change an optimizer step


class FromConfig:
    """Builds the subject of a verification from the command line of `fit`.

    Module and strategy are the config's own; of the Trainer's settings only gradient clipping is used, and neither
    callbacks, loggers nor the data module.

    Args:
        args: Arguments of `lightning-megatron-rl fit`.
    """

    def __init__(self, args: Sequence[str]) -> None:
        self.args = list(args)

    def __call__(self, layout: dict[str, Any]) -> Subject:
        """Parse and build.

        Raises:
            ValueError: A class refuses its settings; or the config's strategy is another than `MegatronStrategy`.
            SystemExit: The parser refuses the config, as in `fit`.
        """
        environment = dict(os.environ)
        disabled = logging.root.manager.disable
        logging.disable(logging.INFO)  # what a Trainer tells about itself, for one that is not used
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
                built = _Built(self.args, layout)
        finally:  # seed_everything leaves variables
            logging.disable(disabled)
            os.environ.clear()
            os.environ.update(environment)
        trainer = built.config_init["fit"]["trainer"]
        return Subject(built.model, trainer["strategy"], {name: trainer[name] for name in _KEPT})


class _Built(CommandLine):
    """`fit` up to the built module, with the layout in the place of the config's own."""

    def __init__(self, args: list[str], layout: dict[str, Any]) -> None:
        self.layout = layout
        super().__init__(["fit", *args])

    def before_instantiate_classes(self) -> None:
        """Put the layout in, and leave out whatever writes files or asks for devices."""
        trainer = self._get(self.config, "trainer")
        trainer["callbacks"], trainer["logger"], trainer["plugins"], trainer["profiler"] = None, False, None, None
        strategy = trainer["strategy"]
        if not isinstance(strategy, Namespace):
            if strategy not in ("megatron", "auto"):
                raise ValueError(f"trainer.strategy={strategy}: verify-layout compares layouts of MegatronStrategy.")
            path = f"{MegatronStrategy.__module__}.{MegatronStrategy.__qualname__}"
            trainer["strategy"] = strategy = Namespace(class_path=path, init_args=Namespace())
        for name, value in self.layout.items():
            strategy["init_args"][name] = value

    def instantiate_classes(self) -> None:
        """Build; what a class refuses is reported with the layout."""
        LightningCLI.instantiate_classes(self)
        strategy = self._get(self.config_init, "trainer")["strategy"]
        if not isinstance(strategy, MegatronStrategy):
            raise ValueError(
                f"trainer.strategy is {type(strategy).__name__}: verify-layout compares layouts of MegatronStrategy."
            )

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Return a Trainer that is not used: each layout has one of its own."""
        return pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, barebones=False)

    def fit(self, **_: Any) -> None:
        """Do not train."""
