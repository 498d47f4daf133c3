"""`WeightAverage`: a running average of the policy's weights, for validation, export and use after the run."""

from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback

from lightning_megatron_rl.callbacks.weight_sync import WeightSync
from lightning_megatron_rl.strategy.averaging import AveragedWeights
from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer
from lightning_megatron_rl.strategy.required import require_megatron
from lightning_megatron_rl.utilities.ranges import COUNT, COUNT_OR_NONE, Range, check_ranges

AVERAGE = "average"  # its name in checkpoints


class WeightAverage(Callback):
    """Average the trained weights over the steps: exponentially (EMA), or all alike (SWA).

    The same as Lightning's `EMAWeightAveraging` and `WeightAveraging`, for Megatron's shards: the average is one of the
    optimizer's fp32 main parameters, kept in fp32, split over the ranks as its state is (4 bytes per parameter; under
    the distributed optimizer divided by the replicas), and part of each checkpoint with optimizer state. Buffers, such
    as the biases that balance experts, are not averaged. From the first update on, validation uses the average (with a
    sampler, weights are pushed before it and after it), ``HFExport(average=True)`` exports it, and after the fit the
    module has it. Training and checkpoints go on with the weights themselves.

    Args:
        decay: ``average = decay * average + (1 - decay) * weights`` after a step; None: the equal average of all
            updates. The first update copies the weights.
        update_every_n_steps: Update after each step whose number, from 0, this divides.
        update_starting_at_step: Number of the first step, from 0, after which there may be an update.
        validate: Use the average in the fit's validations.

    Raises:
        ValueError: A decay outside (0, 1), invalid numbers of steps, or two of these callbacks.
    """

    def __init__(
        self,
        decay: float | None = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int = 0,
        validate: bool = True,
    ) -> None:
        ranges = {
            "decay": Range(above=0, below=1, note="None is the equal average of all updates"),
            "update_every_n_steps": COUNT,
            "update_starting_at_step": COUNT_OR_NONE.called("it is the number of a step"),
        }
        check_ranges(ranges, locals(), "WeightAverage.")
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.validate = validate
        self._average: AveragedWeights | None = None
        self._in_place: AbstractContextManager[None] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Check the other callbacks.

        Raises:
            TypeError: The strategy is none of Megatron's.
            ValueError: There is another average, or a `WeightSync` that would push weights too early.
        """
        require_megatron(trainer, self)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if sum(isinstance(callback, WeightAverage) for callback in callbacks) > 1:
            raise ValueError("two WeightAverage callbacks: their averages would have one name. Keep one of them.")
        before = callbacks[: callbacks.index(self)]
        if self.validate and any(isinstance(callback, WeightSync) for callback in before):
            raise ValueError(
                "WeightSync comes before WeightAverage in the Trainer's callbacks: it would push the weights of"
                " validations before they are the average. List WeightAverage first, or leave WeightSync out."
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start from the weights of the start; a checkpoint's average is loaded after this."""
        optimizer = trainer.strategy.optimizers[0]
        assert isinstance(optimizer, MegatronOptimizer)
        self._average = optimizer.add_average(AVERAGE)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Update after a step."""
        step = trainer.global_step - 1
        if step >= self.update_starting_at_step and step % self.update_every_n_steps == 0:
            assert self._average is not None
            self._average.update(self.decay)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Let the model have the average."""
        if self.validate and self._average is not None and self._average.count > 0:
            self._in_place = self._average.in_place()
            self._in_place.__enter__()
            self._forget_sync(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Give the model its own weights back, before a checkpoint is saved."""
        if self._in_place is not None:
            self._in_place.__exit__(None, None, None)
            self._in_place = None
            self._forget_sync(pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Leave the average in the model; no checkpoint is saved after this."""
        assert self._average is not None
        if self._average.count > 0:
            self._average.keep_in_place()
            self._forget_sync(pl_module)
        self._average = None

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Forget the run's average; the model has its own weights again, without a word to the other ranks."""
        if self._in_place is not None:
            trainer.strategy.reload()  # type: ignore[attr-defined]  # a sampler may have been at work
            self._in_place.__exit__(type(exception), exception, exception.__traceback__)
        self._average = self._in_place = None

    @staticmethod
    def _forget_sync(pl_module: Any) -> None:
        """A sampler's weights are not the model's any more."""
        sampler = getattr(pl_module, "sampler", None)
        if sampler is not None:
            sampler.version = None
