"""What Lightning leaves out of resuming: whether a run is resumed, and the validation due at its checkpoint."""

from collections.abc import Mapping
from inspect import currentframe
from pathlib import Path
from traceback import walk_stack
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

_BATCHES, _VALIDATION = "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"


def run_arguments(trainer: "pl.Trainer") -> dict[str, Any] | None:
    """Return `ckpt_path` and `weights_only` of the run that calls this, in a hook; None if they cannot be told.

    Lightning has looked the checkpoint up ("last", a requeued SLURM job's), but passes it on as an argument alone:
    `trainer.ckpt_path` is that of the run before, until the weights are loaded. `weights_only` it passes to strategies
    that load before `setup`, and to no others. So both are read from the call of `Trainer._run`.
    """
    known = _known_to_run(trainer)
    return None if known is None else {name: known.get(name) for name in ("ckpt_path", "weights_only")}


def starting_checkpoint(trainer: "pl.Trainer") -> Path | None:
    """Return the checkpoint that the run which calls this, in a hook, starts from, if there is one and it can be told.

    Example:
        ``if (path := starting_checkpoint(trainer)) is not None: read_manifest(path)``
    """
    known = _known_to_run(trainer)
    return None if known is None or known["ckpt_path"] is None else Path(known["ckpt_path"])


def _known_to_run(trainer: "pl.Trainer") -> Mapping[str, Any] | None:
    for frame, _ in walk_stack(currentframe()):
        known = frame.f_locals if frame.f_code.co_qualname == "Trainer._run" else {}
        if known.get("self") is trainer and "ckpt_path" in known:
            return known
    return None


def resumes(trainer: "pl.Trainer") -> bool | None:
    """Whether the run that calls this, in a hook, starts from a checkpoint; None if that cannot be told.

    Example:
        ``if resumes(trainer) is False: refuse()``
    """
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
