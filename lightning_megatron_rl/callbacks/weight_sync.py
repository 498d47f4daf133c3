"""`WeightSync`: the engine always samples with the policy's newest weights."""

from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch import Callback


class Syncs(Protocol):
    """What the `sampler` of a module offers."""

    version: int | None  # of the weights that the engine has, None before the first push

    def sync(self, version: int, *, for_stream: bool = True) -> None:
        """Push the weights to the engine; a collective.

        Args:
            version: Becomes that of the engine.
            for_stream: Responses of a stream that are under way go on with them.
        """

    def close(self) -> None:
        """End the engine and free what it holds."""


class WeightSync(Callback):
    """Push the weights whenever sampling is about to start and the engine's are older than the policy's.

    The version is the Trainer's `global_step`, so a run that was restored pushes what it restored. `GRPOModule` adds
    this callback by itself unless the Trainer has one.
    """

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Sync before the rollout."""
        self._sync(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Sync before validation samples."""
        self._sync(trainer, pl_module, for_stream=False)

    def on_test_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Sync before test samples."""
        self._sync(trainer, pl_module, for_stream=False)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Sync before predictions."""
        self._sync(trainer, pl_module, for_stream=False)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """End the engine with a run that failed or was interrupted."""
        pl_module.sampler.close()

    def _sync(self, trainer: pl.Trainer, pl_module: Any, *, for_stream: bool = True) -> None:
        sampler: Syncs = pl_module.sampler
        if sampler.version != trainer.global_step:
            sampler.sync(trainer.global_step, for_stream=for_stream)
