"""The command line: Lightning's own `LightningCLI` with this project's classes known by their short names."""

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningCLI

# jsonargparse finds a class by its short name among those that are imported
from lightning_megatron_rl.callbacks.hf_export import HFExport
from lightning_megatron_rl.callbacks.rollout_samples import RolloutSamples
from lightning_megatron_rl.callbacks.weight_sync import WeightSync
from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.data.sft import SFTDataModule
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.strategy.megatron import MegatronStrategy

__all__ = [
    "GRPOModule",
    "HFExport",
    "MegatronStrategy",
    "PromptDataModule",
    "RolloutSamples",
    "SFTDataModule",
    "SFTModule",
    "WeightSync",
    "run",
]

_PROGRAM = "lightning-megatron-rl"
# inference mode would make tensors that Megatron's buffers could not be updated with afterwards
_TRAINER_DEFAULTS = {"inference_mode": False}


def run(args: list[str]) -> LightningCLI:
    """Parse `args` and run the command in them.

    Args:
        args: Command line without the program's name, e.g. ``["fit", "--config", "configs/demo/grpo.yaml"]``.
    """
    return LightningCLI(
        model_class=pl.LightningModule,
        datamodule_class=pl.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        trainer_defaults=_TRAINER_DEFAULTS,
        seed_everything_default=1234,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"prog": _PROGRAM, "default_env": True},
        args=args,
    )
