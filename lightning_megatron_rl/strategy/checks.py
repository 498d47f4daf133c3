"""Trainer settings that this strategy refuses, each with what to use in its place."""

from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_megatron_rl.devices.checks import check_cuda, peer_warnings
from lightning_megatron_rl.devices.measure import count_gpus, measure_devices, measure_links
from lightning_megatron_rl.ranges import COUNT, COUNT_OR_NONE, NOT_NEGATIVE, POSITIVE, Range, check_ranges
from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer

_TRAINER_RANGES = {
    "gradient_clip_val": NOT_NEGATIVE.called("leave it out for no clipping"),
    "log_every_n_steps": COUNT_OR_NONE,
    "val_check_interval": POSITIVE.called("set limit_val_batches=0 for no validation"),
    "check_val_every_n_epoch": COUNT,
    "num_sanity_val_steps": Range(least=-1, whole=True, note="-1 runs all validation batches"),
}


def check_trainer(trainer: "pl.Trainer") -> None:
    """Refuse Trainer settings that would change numbers or cannot work with Megatron's schedule.

    Raises:
        ValueError: Naming the setting, its value and what to use in its place.
        RuntimeError: CUDA can use none of the GPUs that Lightning has chosen; with the reason.
    """
    if trainer.strategy.root_device.type == "cuda" and count_gpus() == 0:
        check_cuda(measure_devices(imports=False))
    check_trainer_numbers(trainer)
    warn_of_fp32(trainer.strategy.root_device, trainer.strategy.precision_plugin.precision)
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: one batch is one mini-batch here, and"
            " Megatron's schedule accumulates over its micro-batches. Set accumulate_grad_batches=1, raise the data"
            " module's batch_size for a larger mini-batch, and lower max_tokens_per_microbatch to save memory."
        )
    check_checkpoint_callbacks(trainer.checkpoint_callbacks)
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__}.automatic_optimization=False: under manual optimisation Lightning neither clips"
            " gradients nor steps learning-rate schedulers, and counts steps differently. Keep automatic optimisation;"
            " for several updates per batch call self.optimizers().step() for all but the last."
        )


def check_trainer_numbers(trainer: "pl.Trainer") -> None:
    """Refuse numbers of the Trainer that Lightning takes and that mean nothing.

    Raises:
        ValueError: With the name, the value and the range.
    """
    given = {name: getattr(trainer, name) for name in _TRAINER_RANGES}
    # -1 was made infinite; an interval of time is text
    given["num_sanity_val_steps"] = min(trainer.num_sanity_val_steps, 10**9)
    given["val_check_interval"] = (
        trainer.val_check_interval if isinstance(trainer.val_check_interval, int | float) else None
    )
    check_ranges(_TRAINER_RANGES, given, "trainer.")


def warn_of_fp32(device: torch.device, precision: str) -> None:
    """Warn of a GPU that would train in fp32: Lightning's default, which few runs on GPUs mean."""
    if device.type == "cuda" and precision == "32-true":
        rank_zero_warn(
            "precision='32-true' on a GPU: weights, gradients and activations take 4 bytes per number, and matrix"
            " products are several times slower than in bf16. Set Trainer(precision='bf16-mixed') unless fp32 is what"
            " you want."
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
