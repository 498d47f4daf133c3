"""Trainer settings that this strategy refuses, each with an alternative."""

import sys
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_megatron_rl.compat.lightning import has_layer_sync
from lightning_megatron_rl.devices.checks import check_cuda, peer_warnings
from lightning_megatron_rl.devices.measure import count_gpus, measure_devices, measure_links
from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer
from lightning_megatron_rl.strategy.precision import CLIPS_BY_NORM
from lightning_megatron_rl.utilities.files import check_local
from lightning_megatron_rl.utilities.ranges import COUNT, COUNT_OR_NONE, NOT_NEGATIVE, POSITIVE, Range, check_ranges
from lightning_megatron_rl.utilities.text_files import user_path

_ACCUMULATION = (
    "one batch is one mini-batch here, and Megatron's schedule accumulates over its micro-batches. Raise the data"
    " module's batch_size for a larger mini-batch, and lower train.max_tokens_per_microbatch to save memory."
)
_AVERAGE = (
    "it would copy the module before its model is built, and average no shard of Megatron's. Use this package's"
    " WeightAverage(decay=0.999), which is kept beside the optimizer's state, or WeightAverage(decay=None) for the"
    " equal average of all steps"
)
# Lightning's callbacks that would have no or a wrong effect, or fail later; and what to use instead
REFUSED_CALLBACKS: dict[type[Callback], str] = {
    BaseFinetuning: (
        "it freezes parameters and adds them to the optimizer while training goes on, which Megatron's optimizer does"
        " not see. Train adapters with the module's lora, or freeze parameters from the start (requires_grad_(False) in"
        " configure_model)"
    ),
    LearningRateFinder: (
        "it writes an attribute `lr` of the module, which nobody reads here. Try some values of OptimizerConfig(lr=...)"
    ),
    ModelPruning: (
        "it replaces parameters by masked copies, which Megatron's buffers, optimizer and checkpoints do not have."
        " Prune an export (HFExport) and train that"
    ),
    StochasticWeightAveraging: _AVERAGE,
    WeightAveraging: _AVERAGE,
}

SEVERAL_OPTIMIZERS = (
    "configure_optimizers returned several optimizers: MegatronStrategy steps one, under automatic optimisation."
    " Return that of `self.model`, made with `self.trainer.strategy.build_optimizer(OptimizerConfig(lr=...))`;"
    " OptimizerConfig(decoupled_lr=...) gives embeddings a learning rate of their own. Step the optimizer of a second"
    " Megatron model in training_step, as PPOModule does with its critic."
)


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
        TypeError: Megatron cannot train the module.
        RuntimeError: CUDA can use none of the GPUs that Lightning has chosen; with the reason.
    """
    if trainer.strategy.root_device.type == "cuda" and count_gpus() == 0:
        check_cuda(measure_devices(imports=False))
    check_trainer_numbers(trainer)
    warn_of_fp32(trainer.strategy.root_device, trainer.strategy.precision_plugin.precision)
    check_optimisation(trainer)
    check_clipping(trainer)
    check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
    check_checkpoint_places(trainer)
    if has_layer_sync(trainer.strategy):
        raise ValueError(
            "sync_batchnorm (or another LayerSync plugin): Megatron's models have no batch normalisation, and the"
            " strategy converts no layers. Remove it."
        )
    check_module(trainer.lightning_module)


def check_module(module: "pl.LightningModule") -> None:
    """Refuse a module that the strategy cannot train, or whose hooks would not be called.

    Raises:
        ValueError: It has a `backward` of its own.
        TypeError: It has no Megatron model and does not build one.
    """
    if not is_overridden("configure_model", module) and not isinstance(getattr(module, "model", None), nn.ModuleList):
        raise TypeError(no_megatron_model(module))
    if is_overridden("backward", module):
        raise ValueError(
            f"{type(module).__name__}.backward would never be called: Megatron's schedule computes the gradients in"
            " training_step. Change the loss per token for other gradients, or the gradients themselves in"
            " on_before_optimizer_step (parameter.grad, in place), and remove backward."
        )


def check_optimisation(trainer: "pl.Trainer") -> None:
    """Refuse accumulation over batches and manual optimisation; callbacks may switch them on at any time.

    Raises:
        ValueError: Naming the setting and what to use in its place.
    """
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: {_ACCUMULATION} Set accumulate_grad_batches=1."
        )
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__}.automatic_optimization=False: under manual optimisation Lightning neither clips"
            " gradients nor steps learning-rate schedulers, and counts steps differently. Keep automatic optimisation;"
            " for several updates per batch call self.optimizers().step() for all but the last."
        )


def check_clipping(trainer: "pl.Trainer") -> None:
    """Refuse clipping by value; a module that configures clipping by itself may do something else.

    Raises:
        ValueError: With what to set in its place.
    """
    by_value = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
    if not by_value or not trainer.gradient_clip_val:
        return
    if not is_overridden("configure_gradient_clipping", trainer.lightning_module):
        raise ValueError(CLIPS_BY_NORM)


def check_trainer_numbers(trainer: "pl.Trainer") -> None:
    """Refuse meaningless numbers of the Trainer that Lightning accepts, and a time between validations.

    Raises:
        ValueError: With the name, the value and the range.
    """
    if "val_check_interval" not in vars(trainer):  # Lightning keeps one of time elsewhere
        raise ValueError(
            "trainer.val_check_interval is a time: each rank would look at a clock of its own, and one would validate"
            " while another trains. Give a number of batches, or a fraction of an epoch."
        )
    given = {name: getattr(trainer, name) for name in _TRAINER_RANGES}
    given["num_sanity_val_steps"] = min(trainer.num_sanity_val_steps, 10**9)  # -1 was made infinite
    check_ranges(_TRAINER_RANGES, given, "trainer.")


def warn_of_fp32(device: torch.device, precision: str) -> None:
    """Warn of a run in fp32 on a GPU: Lightning's default, rarely intended there."""
    if device.type == "cuda" and precision == "32-true":
        rank_zero_warn(
            "precision='32-true' on a GPU: weights, gradients and activations take 4 bytes per number, and matrix"
            " products are several times slower than in bf16. Set Trainer(precision='bf16-mixed') unless fp32 is what"
            " you want."
        )


def no_megatron_model(module: "pl.LightningModule | None") -> str:
    """Return what is wrong with a module whose `model` is not a list of Megatron's chunks."""
    return (
        f"{type(module).__name__}.model is {type(getattr(module, 'model', None)).__name__}: MegatronStrategy trains an"
        " nn.ModuleList of Megatron model chunks, which `configure_model` must assign to `self.model`. Use SFTModule,"
        " GRPOModule, PPOModule, DPOModule or RewardModule with a Hugging Face model, or a subclass of one of them."
    )


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse callbacks that accumulate gradients, save on exceptions, or have no effect on Megatron.

    Raises:
        ValueError: Naming the callback and what to use in its place.
    """
    for callback in callbacks:
        for refused, reason in REFUSED_CALLBACKS.items():
            if isinstance(callback, refused):
                raise ValueError(f"{type(callback).__name__} does not work with MegatronStrategy: {reason}.")
        if isinstance(callback, GradientAccumulationScheduler) and callback.going_to_accumulate_grad_batches():
            raise ValueError(
                f"{type(callback).__name__}(scheduling={callback.scheduling}): {_ACCUMULATION} Remove the callback; for"
                " mini-batches that grow while training goes on, let the data module's sampler give larger batches."
            )
        if isinstance(callback, OnExceptionCheckpoint) or (
            isinstance(callback, ModelCheckpoint) and callback.save_on_exception
        ):
            raise ValueError(
                f"{type(callback).__name__} would save when an exception comes up: in the middle of a batch, which a"
                " resumed run would skip, and on some ranks only, which wait for the others. Use"
                " ModelCheckpoint(every_n_train_steps=...); a run that is told to stop saves by itself."
            )


def check_timers_again(trainer: "pl.Trainer") -> None:
    """Let timers stop a run whose time was up before it was resumed.

    Lightning has them look in `on_fit_start`; where checkpoints are loaded after the strategy's setup, they do not know
    the time before the resume then.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Timer):
            callback.on_fit_start(trainer)


def check_checkpoint_places(trainer: "pl.Trainer") -> None:
    """Refuse URLs as places of checkpoints, and `~` where nobody knows it.

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
            setting = f"{type(trainer.loggers[0]).__name__}(save_dir) of a ModelCheckpoint without dirpath"
            check_local(save_dir, setting)
            if str(save_dir).startswith("~") and not isinstance(trainer.loggers[0], CSVLogger):  # whose `~` is known
                raise ValueError(
                    f"{setting}={str(save_dir)!r}: Lightning would put checkpoints into a directory called '~'. Write"
                    f" the whole path, {user_path(save_dir)}, or give ModelCheckpoint a dirpath."
                )
        else:
            check_local(trainer.default_root_dir, "Trainer(default_root_dir)")


def refuse_checkpoint_io(plugin: object) -> None:
    """Refuse a `CheckpointIO` plugin, which would not be used.

    Raises:
        ValueError: Names it, and what to use in its place.
    """
    if plugin is not None:
        raise ValueError(
            f"Trainer(plugins=[{type(plugin).__name__}]): MegatronStrategy writes and reads checkpoints itself, by all"
            " ranks, and would never call a CheckpointIO plugin. Leave it out; MegatronStrategy(async_save=True), the"
            " default, writes beside training, and a callback can copy complete checkpoints elsewhere."
        )


def refuse_storage_options(options: object) -> None:
    """Refuse `storage_options` of a checkpoint.

    Raises:
        ValueError: There are some.
    """
    if options is not None:
        raise ValueError(
            f"storage_options={options!r}: distributed checkpoints are written to a local or shared file system and"
            " take no storage options."
        )


def refuse_interactive(num_devices: int) -> None:
    """Refuse several devices without a script that the other processes could run.

    Raises:
        ValueError: In a notebook or an interactive Python.
    """
    if hasattr(sys, "ps1") or sys.flags.interactive:
        raise ValueError(
            f"MegatronStrategy on {num_devices} devices in a notebook or an interactive Python: each device is a"
            " process that runs a script from its beginning, and there is none. Use Trainer(devices=1), or put the code"
            " into a script and run it with python, torchrun or `lightning-megatron-rl fit`."
        )


def refuse_plateau(scheduler: object) -> None:
    """Refuse a scheduler that looks at a metric, torch's own or Lightning's with a `monitor`.

    Raises:
        ValueError: It is one.
    """
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            f"train.lr_scheduler={type(scheduler).__module__}.{type(scheduler).__name__}: Lightning steps it when the"
            " step's checkpoint is written already, so a resumed run would have other learning rates. Use one that"
            " counts steps, such as torch.optim.lr_scheduler.CosineAnnealingLR."
        )


def check_loss(returned: torch.Tensor, computed: torch.Tensor | None) -> None:
    """Refuse what `training_step` may not return in the place of the loss that its update has computed.

    Raises:
        ValueError: It carries a graph, or is another loss.
    """
    refuse_graph(returned)
    refuse_other_loss(returned, computed)


def refuse_graph(loss: torch.Tensor) -> None:
    """Refuse a loss with a graph, whose gradients would be neither reduced nor divided.

    Raises:
        ValueError: It has one.
    """
    if loss.requires_grad:
        raise ValueError(
            "training_step returned a loss with an autograd graph: Megatron's schedule computes the gradients in"
            " self.update(...) or strategy.forward_backward(...), and those of another backward pass would not be"
            " reduced over the ranks. Return loss.detach(), and add further terms to the loss per token."
        )


def refuse_other_loss(returned: torch.Tensor, computed: torch.Tensor | None) -> None:
    """Refuse a loss that was changed after its gradients were computed: they would stay as they are.

    Raises:
        ValueError: With both losses.
    """
    if computed is None:  # a module of the user's own, which says by itself what its loss is
        return
    # a mean over ranks, or another number format, may round
    if not torch.isclose(returned.to(computed), computed, rtol=1e-5, atol=0.0, equal_nan=True).all():
        raise ValueError(
            f"training_step returned a loss of {returned.item():g}, the update's is {computed.item():g}: its gradients"
            " are computed already, and would not change with the loss. Return the loss as it is, and change the loss"
            " per token, or the gradients in on_before_optimizer_step (parameter.grad, in place)."
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
