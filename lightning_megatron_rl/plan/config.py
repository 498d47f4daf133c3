"""Builds module, data and strategy of the YAML files of `fit`, without devices, and describes them to the planner."""

import logging
import os
import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningCLI

from lightning_megatron_rl.cli import GPU_PRECISION, CommandLine
from lightning_megatron_rl.models.published import read_config
from lightning_megatron_rl.modules.model import ModelModule
from lightning_megatron_rl.modules.planning import Lengths, Model, describe_run
from lightning_megatron_rl.planner.hardware import Hardware
from lightning_megatron_rl.planner.run import Run
from lightning_megatron_rl.strategy.megatron import MegatronStrategy
from lightning_megatron_rl.strategy.precision import MegatronPrecision


class FromConfig(CommandLine):
    """`fit` up to the built module, data and strategy; nothing is loaded, written or asked of devices."""

    def __init__(self, args: Sequence[str]) -> None:
        environment = dict(os.environ)
        disabled = logging.root.manager.disable
        logging.disable(logging.INFO)  # what a Trainer tells about itself, for one that is not used
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
                super().__init__(["fit", *args])
        finally:  # seed_everything leaves variables
            logging.disable(disabled)
            os.environ.clear()
            os.environ.update(environment)

    def before_instantiate_classes(self) -> None:
        """Keep what a plan needs of the Trainer's settings, and leave out whatever writes files or asks for devices."""
        trainer = self._get(self.config, "trainer")
        self.devices, self.nodes = trainer["devices"], int(trainer["num_nodes"])
        self.precision: Any = trainer["precision"] or GPU_PRECISION
        self.written_callbacks, self.written_logger = _plain(trainer["callbacks"]), _plain(trainer["logger"])
        trainer["callbacks"], trainer["logger"], trainer["plugins"], trainer["profiler"] = None, False, None, None
        if not isinstance(trainer["strategy"], Namespace):
            path = f"{MegatronStrategy.__module__}.{MegatronStrategy.__qualname__}"
            trainer["strategy"] = Namespace(class_path=path, init_args=Namespace())

    def instantiate_classes(self) -> None:
        """Build; what a class refuses is an error of the command."""
        LightningCLI.instantiate_classes(self)
        strategy = self._get(self.config_init, "trainer")["strategy"]
        if not isinstance(strategy, MegatronStrategy):
            raise ValueError(f"trainer.strategy is {type(strategy).__name__}: plans are for MegatronStrategy.")
        if not isinstance(self.model, ModelModule):
            raise ValueError(f"model is {type(self.model).__name__}: plans are for the modules of this package.")
        self.strategy: MegatronStrategy = strategy

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Return a Trainer that is not used."""
        return pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, barebones=False)

    def fit(self, **_: Any) -> None:
        """Do not train."""

    def describe(self, kind: Hardware, *, devices: int | None, nodes: int | None, lengths: Lengths) -> Run:
        """Return the run on GPUs of a kind.

        Args:
            kind: The GPUs.
            devices: GPUs of a node; None: what `trainer.devices` says.
            nodes: None: what `trainer.num_nodes` says.
            lengths: Of prompts and responses.

        Raises:
            ValueError: An unknown model, a family that is refused, or no number of devices.
        """
        if devices is None:
            if not str(self.devices).isdecimal():
                raise ValueError(f"trainer.devices={self.devices}: say how many GPUs a node has, as --devices 8")
            devices = int(self.devices)
        model = self.model.model_path
        return describe_run(
            self.model,
            self.datamodule,
            self.strategy,
            model=describe_model(model),
            precision=MegatronPrecision(self.precision),
            kind=kind,
            world=devices * (nodes or self.nodes),
            lengths=lengths,
        )


def _plain(value: Any) -> Any:
    """Settings as plain data."""
    if isinstance(value, Namespace):
        return value.as_dict()
    return [_plain(item) for item in value] if isinstance(value, list) else value


def describe_model(name: str) -> Model:
    """Return a model's sizes from its config alone.

    Raises:
        ValueError: It is unknown, or of a family that is refused.
    """
    from lightning_megatron_rl.models.families.check import check_family, divided_sizes
    from lightning_megatron_rl.models.hf.size import config_shapes, model_size

    config = read_config(name)
    check_family(config)
    return Model(
        name=name,
        size=model_size(config, config_shapes(config)),
        divided=divided_sizes(config),
        dtype=str(config.dtype or "float32").removeprefix("torch."),
        gated_by_silu=getattr(config, "hidden_act", "") == "silu",
    )
