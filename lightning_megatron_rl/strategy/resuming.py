"""What Lightning's loops would lose of a checkpoint that is saved between a batch and the validation due after it."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

_BATCHES, _VALIDATION = "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"


def note_due_validation(checkpoint: dict[str, Any], trainer: "pl.Trainer") -> None:
    """Describe a checkpoint of a batch's end as one of the validation's beginning, if one is due there.

    From the first kind Lightning goes on with the next batch, and metrics, early stopping and the best checkpoints
    miss a validation that the uninterrupted run has had. From the second it runs the validation from its first batch.
    Saved in a callback, the loops have counted the batch as processed, but not as completed.

    Args:
        checkpoint: Lightning's, with the state of its loops; changed in place.
        trainer: Whose loops they are.
    """
    if trainer.state.fn != TrainerFn.FITTING or not trainer.training or "loops" not in checkpoint:
        return
    loop, progress = trainer.fit_loop.epoch_loop, checkpoint["loops"]["fit_loop"][_BATCHES]
    ends_batch = progress["total"]["ready"] == progress["total"]["processed"] == progress["total"]["completed"] + 1
    fetcher = trainer.fit_loop._data_fetcher
    if not ends_batch or fetcher is None or not loop._should_check_val_fx(fetcher):  # the rule is the loop's own
        return
    for counts in (progress["total"], progress["current"]):
        counts["completed"] += 1
    validation = checkpoint["loops"]["fit_loop"][_VALIDATION]
    for name in ("ready", "started"):
        validation["total"][name] += 1
    validation["current"] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    validation["is_last_batch"] = False
