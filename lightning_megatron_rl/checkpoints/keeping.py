"""`CheckpointKeeper`: when checkpoints are written and which of them are kept, for Lightning's callbacks."""

import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import distributed as dist

from lightning_megatron_rl.checkpoints.directories import is_linked, remove, remove_unfinished, switch_link
from lightning_megatron_rl.checkpoints.format import PendingCheckpoint
from lightning_megatron_rl.checkpoints.manifest import is_checkpoint, previous_checkpoints, read_manifest
from lightning_megatron_rl.checkpoints.save_queue import SaveQueue
from lightning_megatron_rl.compat.lightning import run_arguments
from lightning_megatron_rl.parallel.collectives import broadcast
from lightning_megatron_rl.parallel.distributed import run_on_rank_zero
from lightning_megatron_rl.utilities.files import Lock, check_writable
from lightning_megatron_rl.utilities.notices import tell_loss
from lightning_megatron_rl.utilities.text_files import user_path


@dataclass(frozen=True)
class SavedLast:
    """The checkpoint that was saved last in a directory."""

    path: Path
    step: int
    has_optimizer: bool


class CheckpointKeeper:
    """Writes checkpoints beside training; removes and links them when their successors are complete.

    Everything that touches a checkpoint goes through one queue, in the order in which the callbacks asked for it.

    Args:
        phase: Names what runs inside, for errors of collectives.
    """

    def __init__(self, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        self._phase = phase
        self.run_id = ""
        """Of this fit and all that are resumed from its checkpoints; in each manifest, and in what callbacks write."""
        self.resumed_from: tuple[Path, dict[str, Any]] | None = None  # the checkpoint, and its manifest
        self._timeout_s = 0.0
        self._queue = SaveQueue()
        self._queue_group: dist.ProcessGroup | None = None  # of all ranks, for the queue's thread alone
        self._under_way: set[Path] = set()  # what was given to the queue since the last `finish`
        self._newest: dict[Path, SavedLast] = {}  # by directory
        self._locks: dict[Path, Lock] = {}  # on the directories that this fit saves into, on rank 0
        self._outlived: list[Path] = []  # to be removed as soon as no link points to them
        self._linking: Sequence[ModelCheckpoint] = ()

    def start(self, trainer: "pl.Trainer", timeout_s: float) -> None:
        """Prepare a fit: tidy up after killed runs, and take over the links of `save_last="link"`.

        `ModelCheckpoint` deletes the old link before it makes the new one, which would point to a directory that is not
        there yet. It is told to save `last` instead, and `links` answers.

        Args:
            trainer: Of the fit.
            timeout_s: Of the collectives that a save beside training takes.
        """
        self.resumed_from, self._timeout_s = None, timeout_s
        callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        self._linking = [callback for callback in callbacks if callback.save_last == "link"]
        for callback in self._linking:
            callback.save_last = True
        self.lock_directories(trainer)
        if dist.get_rank() == 0:
            for directory in {Path(callback.dirpath) for callback in callbacks if callback.dirpath}:
                with suppress(OSError):  # a directory that cannot be written is refused by the first save
                    remove_unfinished(directory)

    def lock_directories(self, trainer: "pl.Trainer") -> None:
        """Lock this run's checkpoint directories, as far as they are known, until it ends.

        Raises:
            RuntimeError: Another run is saving into one of them.
        """
        callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        directories = {Path(callback.dirpath) for callback in callbacks if callback.dirpath}

        def take() -> None:
            for directory in sorted(directories - self._locks.keys()):
                try:
                    directory.mkdir(parents=True, exist_ok=True)
                    lock = Lock(directory)
                except OSError:  # refused by the first save
                    continue
                if lock.held is False:
                    lock.close()
                    raise RuntimeError(
                        f"another run is saving checkpoints into {directory}: each would replace and delete the"
                        " other's. Give this one a ModelCheckpoint(dirpath=...) of its own, or end the other."
                    )
                self._locks[directory] = lock

        run_on_rank_zero(take)

    def name_run(self, trainer: "pl.Trainer") -> None:
        """Find out, before anything is written, whether this run is new or resumed."""
        fits = trainer.state.fn == TrainerFn.FITTING
        path = (run_arguments(trainer) or {}).get("ckpt_path") if fits else None
        if path is None and self.run_id and (trainer.global_step > 0 or not fits):  # the same Trainer again
            return
        known = run_on_rank_zero(lambda: None if path is None else _run_id(user_path(path)))
        self.run_id = known or broadcast(uuid.uuid4().hex[:12])

    def keep_one_last(self, trainer: "pl.Trainer") -> None:
        """Let `save_last` write to one name, `last.ckpt`, whatever checkpoint the run was resumed from.

        `ModelCheckpoint` replaces the `last.ckpt` that its own state names, and writes `last-v1.ckpt` beside any other.
        One that another run has left, and which is not a link, gets another name first.
        """
        for callback in trainer.checkpoint_callbacks:
            name = getattr(callback, "CHECKPOINT_NAME_LAST", "{")
            if not isinstance(callback, ModelCheckpoint) or not callback.save_last or "{" in name:
                continue
            last = callback.format_checkpoint_name({}, name)
            if callback.file_exists(last, trainer):
                run_on_rank_zero(partial(self._set_aside, Path(last)))
                callback.last_model_path = last

    def _set_aside(self, last: Path) -> None:
        if last.is_symlink() or not is_checkpoint(last):
            return
        try:
            manifest = read_manifest(last)
        except (OSError, ValueError):  # damaged
            return
        owner = manifest.get("run_id", self.run_id)
        if owner != self.run_id:
            other = last.with_name(f"run-{owner}-step={manifest['global_step']}{last.suffix}")
            with suppress(OSError):
                last.rename(other)
                rank_zero_only(tell_loss)(f"{last} is of another run: it is now {other}, and this run writes its own.")

    def stop(self) -> None:
        """Finish saving, and restore the callbacks.

        Raises:
            OSError: The last checkpoint could not be written, on every rank.
        """
        try:
            self.finish()
        finally:
            for callback in self._linking:
                callback.save_last = "link"
            self._linking = ()
            for lock in self._locks.values():
                lock.close()
            self._locks = {}

    def finish(self) -> None:
        """Wait until the checkpoints that were saved are complete; a collective.

        Raises:
            OSError: One could not be written, on every rank.
        """
        with self._phase("checkpoint save"):
            self._under_way.clear()
            self._queue.wait()

    def finish_if_under_way(self, path: Path) -> None:
        """Wait if `path` may not be complete yet, before it is written again; a collective then."""
        if path in self._under_way:
            self.finish()

    def keep(self, checkpoint: PendingCheckpoint, *, later: bool) -> None:
        """Write a checkpoint: now, or beside training, only within a fit, which can wait for it."""
        self._newest[checkpoint.path.parent] = SavedLast(
            checkpoint.path, checkpoint.description["global_step"], checkpoint.description["has_optimizer"]
        )
        if not later:
            checkpoint.write()
            self._remove_outlived()
            rank_zero_info(f"{checkpoint.path}: complete after {checkpoint.age_s:.2f} s.")
            return
        self._under_way.add(checkpoint.path)
        group, waited_s = self._own_group(), checkpoint.age_s

        def write() -> None:
            checkpoint.write(group)
            self._remove_outlived()
            rank_zero_info(
                f"{checkpoint.path}: training waited {waited_s:.2f} s, complete after {checkpoint.age_s:.2f} s."
            )

        self._queue.submit(write, instead=checkpoint.abandon)

    def links(self, path: Path, step: int, has_optimizer: bool, *, later: bool) -> bool:
        """Whether `path`, to be saved now, is the link of a `save_last="link"`; then let it point to what was saved.

        It does so to a checkpoint beside it of this step. If there is none (with `monitor`, where this step is not
        among the best), `path` is saved as a directory.
        """
        wanted = [callback for callback in self._linking if callback.save_top_k != 0]
        newest = self._newest.get(path.parent)
        if newest is None or not any(Path(callback.last_model_path) == path for callback in wanted):
            return False
        if newest != SavedLast(newest.path, step, has_optimizer) or newest.path == path:
            return False
        group = self._own_group() if later else None

        def link() -> None:
            run_on_rank_zero(lambda: switch_link(path, newest.path), group)
            self._remove_outlived()

        if later:
            self._queue.submit(link)
        else:
            link()
        return True

    def remove(self, path: Path) -> None:
        """Delete a checkpoint directory (rank 0), when what was saved before this call is complete."""
        newest = self._newest.get(path.parent)
        if newest is not None and newest.path == path:
            del self._newest[path.parent]
        self.when_saved(lambda: self._remove(path))

    def when_saved(self, job: Callable[[], None]) -> None:
        """Run `job` when earlier saves are complete; never, if one of them fails."""
        if self._queue.is_empty:
            job()
        else:
            self._queue.submit(job)

    def _remove(self, path: Path) -> None:
        if dist.get_rank() > 0:
            return
        if not path.is_symlink() and is_linked(path):
            self._outlived.append(path)
            return
        try:
            remove(path)
        except (OSError, ValueError) as error:  # on this rank alone, and no reason to end a run
            rank_zero_only(tell_loss)(f"the checkpoint {path} was not removed: {error}")

    def _remove_outlived(self) -> None:
        outlived, self._outlived = self._outlived, []
        for path in outlived:
            self._remove(path)

    def supersede(self, saved: Path, trainer: "pl.Trainer") -> None:
        """Let the stop's checkpoint that this run was resumed from become a link to `saved`, when that is complete.

        ``ckpt_path="last"`` and a requeued job then find `saved`. Rank 0.

        Args:
            saved: The checkpoint that was saved just now, perhaps not complete yet.
            trainer: Of this run.
        """
        if self.resumed_from is None:
            return
        place = stop_checkpoint(trainer)
        if place is None or saved.parent.resolve() != place.parent.resolve():
            return
        has_last = any(_saves_last(callback, place.parent.resolve()) for callback in trainer.checkpoint_callbacks)
        if has_last and not saved.name.startswith(ModelCheckpoint.CHECKPOINT_NAME_LAST):
            return  # the one that stays under its name follows

        def follow() -> None:
            if self.resumed_from is None:
                return
            stopped, manifest = self.resumed_from
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
            self.resumed_from = None if has_last else (saved.resolve(), newer)
            self._remove_outlived()

        self.when_saved(follow)

    def _own_group(self) -> dist.ProcessGroup:
        if self._queue_group is None:
            timeout = timedelta(seconds=self._timeout_s)
            self._queue_group = dist.new_group(backend="gloo", timeout=timeout, group_desc="SAVE_QUEUE_GROUP_GLOO")
        return self._queue_group


def check_directories(callbacks: Sequence[Callback]) -> None:
    """Refuse a checkpoint directory that cannot be written to, before anything is loaded; a collective.

    Raises:
        OSError: With the directory and the reason.
    """
    for callback in callbacks:
        directory = callback.dirpath if isinstance(callback, ModelCheckpoint) else None
        if directory is not None:
            run_on_rank_zero(partial(check_writable, Path(directory), f"{type(callback).__name__}(dirpath)"))


def is_fitting(trainer: "pl.Trainer") -> bool:
    """Whether a fit is under way, and not one that an exception has ended."""
    return trainer.state.fn == TrainerFn.FITTING and trainer.state.status == TrainerStatus.RUNNING


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


def _run_id(path: Path) -> str | None:
    """The run that a checkpoint belongs to; if it is damaged, that of one beside it, which may take its place."""
    for candidate in (path, *previous_checkpoints(path)):
        with suppress(OSError, ValueError):
            return read_manifest(candidate).get("run_id")
    return None
