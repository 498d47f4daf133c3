"""`WeightSync`: the engine always samples with the policy's newest weights."""

from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch import Callback


class SyncsWeights(Protocol):
    """What a module with a rollout engine offers."""

    synced_version: int | None  # version of the weights that the engine has, None before the first push

    def sync_weights(self, version: int) -> None:
        """Push the weights to the engine; a collective."""

    def close_engine(self) -> None:
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
        self._sync(trainer, pl_module)

    def on_test_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Sync before test samples."""
        self._sync(trainer, pl_module)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Sync before predictions."""
        self._sync(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """End the engine with a run that failed or was interrupted."""
        pl_module.close_engine()

    def _sync(self, trainer: pl.Trainer, module: SyncsWeights) -> None:
        if module.synced_version != trainer.global_step:
            module.sync_weights(trainer.global_step)
