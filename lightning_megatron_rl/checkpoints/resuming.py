"""Parts of resuming that Lightning lacks: whether a run is resumed, and a validation due at its checkpoint."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from lightning_megatron_rl.compat.lightning import run_arguments, validation_is_due
from lightning_megatron_rl.utilities.text_files import user_path

_BATCHES, _VALIDATION = "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"


def starting_checkpoint(trainer: "pl.Trainer") -> Path | None:
    """Return the checkpoint that the run which calls this, in a hook, starts from; None: none, or unknown."""
    path = (run_arguments(trainer) or {}).get("ckpt_path")
    return None if path is None else user_path(path)


def resumes(trainer: "pl.Trainer") -> bool | None:
    """Whether the run that calls this, in a hook, starts from a checkpoint; None if that cannot be told."""
    arguments = run_arguments(trainer)
    return None if arguments is None else arguments["ckpt_path"] is not None


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
    progress = checkpoint["loops"]["fit_loop"][_BATCHES]
    ends_batch = progress["total"]["ready"] == progress["total"]["processed"] == progress["total"]["completed"] + 1
    if not ends_batch or not validation_is_due(trainer):
        return
    for counts in (progress["total"], progress["current"]):
        counts["completed"] += 1
    validation = checkpoint["loops"]["fit_loop"][_VALIDATION]
    for name in ("ready", "started"):
        validation["total"][name] += 1
    validation["current"] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    validation["is_last_batch"] = False
