"""Trainer settings that this strategy refuses, each with what to use in its place."""

from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_megatron_rl.devices.checks import check_cuda, peer_warnings
from lightning_megatron_rl.devices.measure import count_gpus, measure_devices, measure_links
from lightning_megatron_rl.files import check_local
from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer


def check_trainer(trainer: "pl.Trainer") -> None:
    """Refuse Trainer settings that would change numbers or cannot work with Megatron's schedule.

    Raises:
        ValueError: Naming the setting, its value and what to use in its place.
        RuntimeError: CUDA can use none of the GPUs that Lightning has chosen; with the reason.
    """
    if trainer.strategy.root_device.type == "cuda" and count_gpus() == 0:
        check_cuda(measure_devices(imports=False))
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: one batch is one mini-batch here, and"
            " Megatron's schedule accumulates over its micro-batches. Set accumulate_grad_batches=1, raise the data"
            " module's batch_size for a larger mini-batch, and lower max_tokens_per_microbatch to save memory."
        )
    check_checkpoint_callbacks(trainer.checkpoint_callbacks)
    check_checkpoint_places(trainer)
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__}.automatic_optimization=False: under manual optimisation Lightning neither clips"
            " gradients nor steps learning-rate schedulers, and counts steps differently. Keep automatic optimisation;"
            " for several updates per batch call self.optimizers().step() for all but the last."
        )


def check_checkpoint_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse callbacks that save where an exception came up.

    Raises:
        ValueError: Naming the callback and what to use in its place.
    """
    for callback in callbacks:
        if isinstance(callback, OnExceptionCheckpoint) or (
            isinstance(callback, ModelCheckpoint) and callback.save_on_exception
        ):
            raise ValueError(
                f"{type(callback).__name__} would save when an exception comes up: in the middle of a batch, which a"
                " resumed run would skip, and on some ranks only, which wait for the others. Use"
                " ModelCheckpoint(every_n_train_steps=...); a run that is told to stop saves by itself."
            )


def check_checkpoint_places(trainer: "pl.Trainer") -> None:
    """Refuse URLs as places of checkpoints.

    Raises:
        ValueError: Names the setting, its value, and what to give in its place.
    """
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        if callback.dirpath is not None:
            check_local(callback.dirpath, f"{type(callback).__name__}(dirpath)")
        elif trainer.loggers:  # where Lightning puts them then
            save_dir = trainer.loggers[0].save_dir or trainer.default_root_dir
            check_local(save_dir, f"{type(trainer.loggers[0]).__name__}(save_dir) of a ModelCheckpoint without dirpath")
        else:
            check_local(trainer.default_root_dir, "Trainer(default_root_dir)")


def refuse_checkpoint_io(plugin: object) -> None:
    """Refuse a `CheckpointIO` plugin, which would be given no checkpoint to write or read.

    Raises:
        ValueError: Names it, and what to use in its place.
    """
    if plugin is not None:
        raise ValueError(
            f"Trainer(plugins=[{type(plugin).__name__}]): MegatronStrategy writes and reads checkpoints itself, by all"
            " ranks, and would never call a CheckpointIO plugin. Leave it out; MegatronStrategy(async_save=True), the"
            " default, writes beside training, and a callback can copy complete checkpoints elsewhere."
        )


def avoid_inference_tensors(trainer: "pl.Trainer") -> None:
    """Evaluate under `torch.no_grad` where Lightning's default is `torch.inference_mode`.

    State that is first made in an evaluation (caches, buffers of layers) would be inference tensors, which training
    can neither update in place nor save for backward.
    """
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Refuse anything but one optimizer of Megatron's.

    Raises:
        TypeError: Naming what `configure_optimizers` returned.
    """
    if len(optimizers) != 1 or not isinstance(optimizers[0], MegatronOptimizer):
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
        raise TypeError(
            f"configure_optimizers returned {names}: MegatronStrategy needs exactly one optimizer, made with"
            " `self.trainer.strategy.build_optimizer(OptimizerConfig(lr=...))`."
        )


def warn_of_slow_links(devices: Sequence[torch.device], local_rank: int) -> None:
    """Warn once, where the GPUs of the first node reach each other slowly; a CPU run has no links."""
    gpus = [device.index for device in devices if device.type == "cuda"]
    if len(gpus) > 1 and local_rank == 0:
        for warning in peer_warnings(measure_links(gpus)):
            rank_zero_warn(warning)
