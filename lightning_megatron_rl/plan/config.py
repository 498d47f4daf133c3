"""Builds module, data and strategy of the YAML files of `fit`, without devices, and describes them to the planner."""

import pydoc
from collections.abc import Sequence
from typing import Any

import yaml
from jsonargparse import Namespace

from lightning_megatron_rl.callbacks.weight_average import WeightAverage
from lightning_megatron_rl.cli import GPU_PRECISION, Built
from lightning_megatron_rl.models.published import read_config
from lightning_megatron_rl.modules.model import ModelModule
from lightning_megatron_rl.modules.planning import Lengths, Model, describe_run, longest_sequence
from lightning_megatron_rl.modules.training import AUTO
from lightning_megatron_rl.planner.budget import choose
from lightning_megatron_rl.planner.hardware import Hardware
from lightning_megatron_rl.planner.run import Run
from lightning_megatron_rl.strategy.precision import MegatronPrecision


class FromConfig:
    """Module, data and strategy of a config of `fit`, and what else a plan needs of it.

    Args:
        args: Arguments of `fit`.

    Raises:
        ValueError: A class refuses its settings; or module or strategy are none of this package.
        SystemExit: The parser refuses the config, as in `fit`.
    """

    def __init__(self, args: Sequence[str]) -> None:
        built = Built(args, "plans are for MegatronStrategy.", self._keep)
        if not isinstance(built.model, ModelModule):
            raise ValueError(f"model is {type(built.model).__name__}: plans are for the modules of this package.")
        self.model, self.datamodule, self.strategy = built.model, built.datamodule, built.strategy
        self._built = built

    def _keep(self, trainer: Namespace) -> None:
        """Keep what is left out of the Trainer's settings."""
        self.devices, self.nodes = trainer["devices"], int(trainer["num_nodes"])
        self.precision: Any = trainer["precision"] or GPU_PRECISION
        self._callbacks, self._logger = _plain(trainer["callbacks"]), _plain(trainer["logger"])
        given = self._callbacks if isinstance(self._callbacks, list) else [self._callbacks]
        paths = [callback["class_path"] for callback in given if isinstance(callback, dict)]
        self._averages = sum(issubclass(pydoc.locate(path), WeightAverage) for path in paths)  # type: ignore[arg-type]

    def settings(self) -> dict[str, Any]:
        """Return all settings of `fit` as plain data, as ``config.yaml`` has them."""
        written = self._built.parser.dump(self._built.config, skip_none=False, skip_check=True)
        found: dict[str, Any] = yaml.safe_load(written)["fit"]
        found["trainer"]["callbacks"], found["trainer"]["logger"] = self._callbacks, self._logger
        return found

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
        nodes = nodes or self.nodes
        model = self.model.model_path
        run = describe_run(
            self.model,
            self.datamodule,
            self.strategy,
            model=describe_model(model),
            precision=MegatronPrecision(self.precision),
            kind=kind.in_nodes(devices, nodes),
            world=devices * nodes,
            lengths=lengths,
            averages=self._averages + self.model.own_averages,
        )
        settings = self.model.train_settings
        if not settings.is_open:
            return run
        return choose(
            run,
            tokens=settings.max_tokens_per_microbatch == AUTO,
            recompute=settings.recompute == AUTO,
            least=longest_sequence(self.model, self.datamodule, self.strategy.layout),
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
