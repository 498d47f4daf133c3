"""Takes steps with new, finite gradients only, and shows them to hooks before."""

import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.optim import Optimizer

from lightning_megatron_rl.parallel.collectives import broadcast
from lightning_megatron_rl.parallel.distributed import run_on_all_ranks
from lightning_megatron_rl.strategy.gradients import Gradients
from lightning_megatron_rl.strategy.nonfinite import (
    NonFiniteError,
    OnNonfinite,
    UpdateTrace,
    describe_failure,
    write_batch,
)
from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer
from lightning_megatron_rl.utilities.notices import tell_loss

_SEES_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")


def bare(optimizer: Optimizer | None) -> Optimizer:
    """Return the optimizer that Lightning has wrapped."""
    assert optimizer is not None
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def show_gradients(optimizer: Optimizer | None, trainer: "pl.Trainer") -> None:
    """Let hooks see gradients where Lightning has them, if any hook looks."""
    optimizer = bare(optimizer)
    assert isinstance(optimizer, MegatronOptimizer)
    optimizer.gradients.release()
    owners = (*trainer.callbacks, trainer.lightning_module)  # type: ignore[attr-defined]
    if any(_overrides(owner, name) for owner in owners for name in _SEES_GRADIENTS):
        optimizer.gradients.show()


def gradients_of(chunks: Sequence[nn.Module], optimizers: Sequence[MegatronOptimizer]) -> Gradients:
    """Return the gradients of trained chunks.

    Raises:
        ValueError: No optimizer steps them.
    """
    for optimizer in optimizers:
        if optimizer.gradients.chunks == list(chunks):
            return optimizer.gradients
    raise ValueError(
        "forward_backward was called for chunks that no optimizer steps: make one with strategy.build_optimizer in"
        " configure_optimizers, or pass forward_only=True."
    )


def answer_nonfinite(
    optimizer: MegatronOptimizer, trainer: "pl.Trainer", on_nonfinite: OnNonfinite, finish_saving: Callable[[], None]
) -> None:
    """End the run on every rank, or warn, if the last step was skipped for a non-finite loss or gradient.

    Overflows of fp16 gradients, which the loss scale handles, do not count.

    Args:
        optimizer: That was to take the step.
        trainer: Of the run.
        on_nonfinite: "skip" only warns.
        finish_saving: Waits until a checkpoint is complete.

    Raises:
        NonFiniteError: With `on_nonfinite="stop"`; names samples, parameters and ranks, and where the batch is, or
            why it could not be kept.
    """
    if optimizer.skipped not in ("loss", "gradient"):
        return
    trace = optimizer.trace or UpdateTrace(optimizer.gradients.chunks, "", math.nan, [], [])
    message = describe_failure(trace, optimizer.grad_norm, trainer.global_step)
    if on_nonfinite == "skip":
        rank_zero_only(tell_loss)(message)
        return
    directory = Path(broadcast(trainer.default_root_dir)) / f"nonfinite-step={trainer.global_step}"
    kept = f"{_keep_batch(trace, directory)} {_keep_weights(trainer, directory, finish_saving)}"
    raise NonFiniteError(
        f"{message} {kept} Mend the samples or lower the learning rate and resume from the last checkpoint, or"
        " leave such steps out with MegatronStrategy(on_nonfinite='skip')."
    )


def _keep_batch(trace: UpdateTrace, directory: Path) -> str:
    """Write the batch, or nothing; return a sentence about it, equal on every rank."""
    place = directory / "batch"
    try:
        run_on_all_ranks(lambda: write_batch(trace, directory))
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        shutil.rmtree(place, ignore_errors=True)
        _remove_if_empty(directory)
        return f"The batch was not kept: {broadcast(str(error))}."
    return f"The batch is in {place}."


def _keep_weights(trainer: "pl.Trainer", directory: Path, finish_saving: Callable[[], None]) -> str:
    """Save the weights, or nothing; return a sentence about it, equal on every rank."""
    place = directory / "weights.ckpt"
    try:
        trainer.save_checkpoint(place, weights_only=True)
        finish_saving()
    except (OSError, RuntimeError) as error:
        _remove_if_empty(directory)
        return f"The weights were not kept: {broadcast(str(error))}"
    return f"The weights are in {place} (init_from reads them)."


def _overrides(owner: Any, name: str) -> bool:
    """Whether a callback or module has a hook of its own; `LambdaCallback` keeps functions on the instance."""
    hook = getattr(owner, name, None)
    defaults = [getattr(base, name, None) for base in (pl.Callback, pl.LightningModule)]
    return hook is not None and getattr(hook, "__func__", hook) not in defaults


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):  # it is not there, or not empty
        directory.rmdir()
