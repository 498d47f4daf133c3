"""`StopsTogether`: the part of the strategy that ends a run between two batches, with a checkpoint."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from lightning_megatron_rl.checkpoints.directories import switch_link
from lightning_megatron_rl.checkpoints.manifest import is_checkpoint, read_manifest
from lightning_megatron_rl.checkpoints.resuming import note_due_validation
from lightning_megatron_rl.parallel.distributed import run_on_rank_zero
from lightning_megatron_rl.strategy.guarding import GuardsSteps
from lightning_megatron_rl.strategy.termination import StopNotice, exit_code, requeue_job
from lightning_megatron_rl.utilities.notices import tell_loss

REQUEUE_LINK = "hpc_ckpt_1.ckpt"  # where Lightning looks for a checkpoint under SLURM if it is given none


class StopsTogether(GuardsSteps):
    """A strategy that answers SIGTERM, SIGUSR1 and, if asked, Ctrl-C, after the batch in which they come.

    Every rank looks for the note of any rank when a batch or a validation has ended, and after the checkpoint callbacks
    have had their turn. The checkpoint is written there, where loops, data and callbacks are between two batches, and
    the run ends when the batch's metrics are logged: before a validation that is due, or before the next batch.
    """

    save_on_interrupt: bool
    _notice: StopNotice | None = None
    _stopping = 0  # the signal that this run is about to end for

    def watch_signals(self, trainer: "pl.Trainer") -> None:
        """Have a look at every batch's end from now on, behind all other callbacks; count steps before them."""
        self._notice = StopNotice(self._signals())
        self._stopping = 0
        trainer.callbacks.insert(0, _CountsSteps())  # type: ignore[attr-defined]
        trainer.callbacks.append(_EndsOfBatches(self))  # type: ignore[attr-defined]

    def _signals(self) -> list[int]:
        signals: list[int] = [signal.SIGTERM, self._requeue_signal]
        return [*signals, signal.SIGINT] if self.save_on_interrupt else signals

    @property
    def _requeue_signal(self) -> int:
        environment = self.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.requeue_signal is not None:
            return environment.requeue_signal
        return signal.SIGUSR1

    @property
    def _requeues(self) -> bool:
        return isinstance(self.cluster_environment, SLURMEnvironment) and self.cluster_environment.auto_requeue

    def on_validation_start(self) -> None:
        """Take the signals over from Lightning before the sanity check."""
        if self._notice is not None:
            self._notice.install()

    def on_train_start(self) -> None:
        """Take the signals over from Lightning; one that came before has nothing new to save."""
        assert self._notice is not None
        self._notice.install()
        assert self.lightning_module is not None
        self.keep_one_last(self.lightning_module.trainer)
        with self.phase("start of training"):
            self._stopping = self._notice.agree(self.root_device)
        self.stop_if_told()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """End the run if it was told to."""
        self.stop_if_told()

    def save_if_told(self, trainer: "pl.Trainer") -> None:
        """Write the checkpoint of a run that was told to stop; a collective at every batch's end."""
        assert self._notice is not None
        with self.phase("end of batch"):
            told = self._notice.agree(self.root_device)
        if not told or 0 <= trainer.max_steps <= trainer.global_step:  # it is about to end by itself
            return
        self._stopping = told
        path = stop_checkpoint(trainer)
        if path is None:
            rank_zero_only(tell_loss)(
                "the run stops without a checkpoint: it has no ModelCheckpoint whose directory would take it."
            )
            return
        trainer.save_checkpoint(path)
        self.finish_saving()
        if self._requeues:
            root = Path(self.broadcast(trainer.default_root_dir))
            run_on_rank_zero(lambda: _link_for_requeue(root, path))
        rank_zero_info(f"The run stops for {signal.Signals(told).name} with the checkpoint {path}.")

    def stop_if_told(self) -> None:
        """Raise on every rank if the run was told to stop.

        Raises:
            SIGTERMException: Ends the run through Lightning's `on_exception` hooks; the first rank exits with 128 plus
                the signal's number, the others with 0, so that a launcher does not take them for crashed and end the
                first one too early.
        """
        if not self._stopping:
            return
        if self._requeues and self._stopping == self._requeue_signal and self.is_global_zero:
            requeue_job()
        raise SIGTERMException(exit_code(self._stopping) if self.is_global_zero else 0)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Write the checkpoint, with a note of a validation that is due; a stop's one makes way for it."""
        if not self._is_set_up:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        note_due_validation(checkpoint, trainer)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._resumed_from is not None and self.is_global_zero and self.is_fitting:
            self._supersede(Path(filepath), trainer)

    def _supersede(self, saved: Path, trainer: "pl.Trainer") -> None:
        """Let the stop's checkpoint that this run was resumed from become a link to `saved`, when that is complete.

        It is what ``ckpt_path="last"`` and a requeued job find when this run is killed, however far that went. Rank 0.

        Args:
            saved: The checkpoint that was saved just now, perhaps not complete yet.
            trainer: Of this run.
        """
        place = stop_checkpoint(trainer)
        if place is None or saved.parent.resolve() != place.parent.resolve():
            return
        has_last = any(_saves_last(callback, place.parent.resolve()) for callback in trainer.checkpoint_callbacks)
        if has_last and not saved.name.startswith(ModelCheckpoint.CHECKPOINT_NAME_LAST):
            return  # the one that stays under its name follows

        def follow() -> None:
            if self._resumed_from is None:
                return
            stopped, manifest = self._resumed_from
            try:  # whatever has the name by then and is another one stays
                if place.resolve() != stopped or not is_checkpoint(place) or read_manifest(place) != manifest:
                    return
                newer = read_manifest(saved)
                if not newer["has_optimizer"] or newer["global_step"] <= manifest["global_step"]:
                    return
                switch_link(place, saved)
            except (OSError, ValueError) as error:
                rank_zero_only(tell_loss)(f"the checkpoint {place} does not make way for {saved}: {error}")
                return
            self._resumed_from = None if has_last else (saved.resolve(), newer)
            self._remove_outlived()

        self._when_saved(follow)

    def forget_signals(self) -> None:
        """Leave the Trainer as it was; a run that was refused at its start is attached to none yet."""
        if self._notice is None:
            return
        assert self.lightning_module is not None
        callbacks = self.lightning_module.trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [it for it in callbacks if not isinstance(it, _EndsOfBatches | _CountsSteps)]
        self._notice, self._stopping = None, 0


class _CountsSteps(pl.Callback):
    """Lets loggers have metrics at `global_step`, the number of the step that ends, as samples and checkpoints have it.

    Lightning's own count is one less at a batch's end and in the validation behind it. A metric named "step" replaces
    it, and the "epoch" that Lightning adds otherwise. It is the first callback: `ModelCheckpoint` takes this step, too,
    for the names of checkpoints.
    """

    def on_train_batch_end(self, trainer: "pl.Trainer", module: "pl.LightningModule", *_: Any) -> None:
        """Log the count."""
        for name, value in (("step", trainer.global_step), ("epoch", trainer.current_epoch)):
            module.log(name, torch.tensor(value, dtype=torch.float64), batch_size=1, sync_dist=False)

    def on_validation_epoch_end(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        """Log the count."""
        self.on_train_batch_end(trainer, module)


class _EndsOfBatches(pl.Callback):
    """Tells the strategy where a batch or a validation ends, which Lightning tells callbacks only."""

    def __init__(self, strategy: StopsTogether) -> None:
        self.strategy = strategy

    def on_train_batch_end(self, trainer: "pl.Trainer", *_: Any) -> None:
        """Save if told to."""
        self.strategy.save_if_told(trainer)

    def on_validation_start(self, trainer: "pl.Trainer", *_: Any) -> None:
        """Leave a validation to the run that goes on."""
        if not trainer.sanity_checking:
            self.strategy.stop_if_told()

    def on_validation_end(self, trainer: "pl.Trainer", *_: Any) -> None:
        """Save if told to during the validation."""
        if not trainer.sanity_checking:
            self.strategy.save_if_told(trainer)


def stop_checkpoint(trainer: "pl.Trainer") -> Path | None:
    """Return where a run that is told to stop leaves its checkpoint: where ``ckpt_path="last"`` looks for it.

    Example:
        With ``ModelCheckpoint("runs/7")`` it is ``runs/7/last-stopped.ckpt``.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            return Path(callback.dirpath) / f"{callback.CHECKPOINT_NAME_LAST}-stopped{callback.FILE_EXTENSION}"
    return None


def _saves_last(callback: pl.Callback, directory: Path) -> bool:
    """Whether `callback` leaves full checkpoints in `directory` that ``ckpt_path="last"`` finds."""
    if not isinstance(callback, ModelCheckpoint) or callback.dirpath is None:
        return False
    return bool(callback.save_last) and not callback.save_weights_only and Path(callback.dirpath).resolve() == directory


def _link_for_requeue(root: Path, path: Path) -> None:
    """Let a requeued job find `path` without a `ckpt_path`, where Lightning looks for the checkpoint it would write."""
    link, new = root / REQUEUE_LINK, root / f".{REQUEUE_LINK}.new"
    root.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        new.unlink()
    new.symlink_to(os.path.relpath(path.resolve(), root.resolve()))
    new.replace(link)
