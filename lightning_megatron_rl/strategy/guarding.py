"""`GuardsSteps`: the part of the strategy that takes steps: with new, finite gradients, which hooks see before."""

import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Union

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.optim import Optimizer

from lightning_megatron_rl.parallel.distributed import run_on_all_ranks
from lightning_megatron_rl.strategy.gradients import Gradients
from lightning_megatron_rl.strategy.nonfinite import (
    NonFiniteError,
    OnNonfinite,
    UpdateTrace,
    describe_failure,
    write_batch,
)
from lightning_megatron_rl.strategy.offloading import OffloadsState
from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer
from lightning_megatron_rl.utilities.notices import tell_loss

_SEES_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")


class GuardsSteps(OffloadsState):
    """A strategy whose optimizers take no step without new gradients, or with a loss or gradient that is not finite."""

    on_nonfinite: OnNonfinite

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's; None skips the step."""
        output = super().training_step(*args, **kwargs)
        for gradients in self._all_gradients(self.optimizers):
            if output is None:
                gradients.drop()
            else:
                gradients.hold()
        return output

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Union["pl.LightningModule", nn.Module] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Take the step and answer one that could not be taken.

        Raises:
            RuntimeError: No gradients were computed since the last step.
        """
        assert isinstance(optimizer, MegatronOptimizer)
        optimizer.set_clip_grad(0.0)  # `configure_gradient_clipping`, which may be the user's, sets it for this step

        def compute() -> Any:
            result = closure()
            self._show_gradients(optimizer)
            return result

        result = super().optimizer_step(optimizer, compute, model, **kwargs)
        self.answer_nonfinite(optimizer)
        return result

    def _show_gradients(self, optimizer: Optimizer | None) -> None:
        """Let hooks see gradients where Lightning has them, if any hook looks."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        assert isinstance(optimizer, MegatronOptimizer)
        optimizer.gradients.release()
        owners = (*trainer.callbacks, self.lightning_module)  # type: ignore[attr-defined]
        if any(_overrides(owner, name) for owner in owners for name in _SEES_GRADIENTS):
            optimizer.gradients.show()

    def _gradients_of(self, chunks: Sequence[nn.Module]) -> Gradients:
        """The gradients of trained chunks.

        Raises:
            ValueError: No optimizer steps them.
        """
        for gradients in self._all_gradients([*self.optimizers, *self.optimizers_saved_with_model.values()]):
            if gradients.chunks == list(chunks):
                return gradients
        raise ValueError(
            "forward_backward was called for chunks that no optimizer steps: make one with strategy.build_optimizer in"
            " configure_optimizers, or pass forward_only=True."
        )

    @staticmethod
    def _all_gradients(optimizers: Sequence[Optimizer]) -> list[Gradients]:
        return [optimizer.gradients for optimizer in optimizers if isinstance(optimizer, MegatronOptimizer)]

    def answer_nonfinite(self, optimizer: MegatronOptimizer) -> None:
        """End the run on every rank, or warn, if the last step was skipped for a loss or gradient that is no number.

        What a loss scale provokes and takes back is neither: fp16 gradients that overflow.

        Raises:
            NonFiniteError: With `on_nonfinite="stop"`; names samples, parameters and ranks, and where the batch is, or
                why it could not be kept.
        """
        if optimizer.skipped not in ("loss", "gradient"):
            return
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        trace = optimizer.trace or UpdateTrace(list(self.chunks), "", math.nan, [], [])
        message = describe_failure(trace, optimizer.grad_norm, trainer.global_step)
        if self.on_nonfinite == "skip":
            rank_zero_only(tell_loss)(message)
            return
        directory = Path(self.broadcast(trainer.default_root_dir)) / f"nonfinite-step={trainer.global_step}"
        kept = f"{self._keep_batch(trace, directory)} {self._keep_weights(trainer, directory)}"
        raise NonFiniteError(
            f"{message} {kept} Mend the samples or lower the learning rate and resume from the last checkpoint, or"
            " leave such steps out with MegatronStrategy(on_nonfinite='skip')."
        )

    def _keep_batch(self, trace: UpdateTrace, directory: Path) -> str:
        """Write the batch, or nothing of it; a sentence that says which, equal on every rank."""
        place = directory / "batch"
        try:
            run_on_all_ranks(lambda: write_batch(trace, directory))
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
            shutil.rmtree(place, ignore_errors=True)
            _remove_if_empty(directory)
            return f"The batch was not kept: {self.broadcast(str(error))}."
        return f"The batch is in {place}."

    def _keep_weights(self, trainer: "pl.Trainer", directory: Path) -> str:
        """Save the weights, or nothing of them; a sentence that says which, equal on every rank."""
        place = directory / "weights.ckpt"
        try:
            trainer.save_checkpoint(place, weights_only=True)
            self.finish_saving()
        except (OSError, RuntimeError) as error:
            _remove_if_empty(directory)
            return f"The weights were not kept: {self.broadcast(str(error))}"
        return f"The weights are in {place} (init_from reads them)."


def _overrides(owner: Any, name: str) -> bool:
    """Whether a callback or module has a hook of its own; `LambdaCallback` keeps functions on the instance."""
    hook = getattr(owner, name, None)
    defaults = [getattr(base, name, None) for base in (pl.Callback, pl.LightningModule)]
    return hook is not None and getattr(hook, "__func__", hook) not in defaults


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):  # it is not there, or not empty
        directory.rmdir()
