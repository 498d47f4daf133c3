"""`KeepsCheckpoints`: when checkpoints are written, and which of them stay, behind Lightning's callbacks."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import ClusterEnvironment
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import distributed as dist

from lightning_megatron_rl.files import check_writable
from lightning_megatron_rl.strategy.checkpoint import PendingCheckpoint
from lightning_megatron_rl.strategy.collectives import CollectiveStrategy
from lightning_megatron_rl.strategy.directories import is_linked, remove, remove_unfinished, switch_link
from lightning_megatron_rl.strategy.distributed import run_on_rank_zero
from lightning_megatron_rl.strategy.save_queue import SaveQueue


class KeepsCheckpoints(CollectiveStrategy):
    """Writes checkpoints while training goes on; removes and links them when what replaces them is complete.

    Everything that touches a checkpoint goes through one queue, in the order in which the callbacks asked for it.
    """

    async_save: bool = True
    timeout_s: float

    def __init__(self, cluster_environment: ClusterEnvironment | None = None) -> None:
        super().__init__(cluster_environment=cluster_environment)
        self._queue = SaveQueue()
        self._queue_group: dist.ProcessGroup | None = None  # of all ranks, for the queue's thread alone
        self._newest: dict[Path, Path] = {}  # the last checkpoint saved in each directory
        self._outlived: list[Path] = []  # to be removed as soon as no link points to them
        self._linking: Sequence[ModelCheckpoint] = ()

    @abstractmethod
    def phase(self, name: str) -> AbstractContextManager[None]:
        """Name what runs inside, for errors of collectives."""

    def check_saving(self, callbacks: Sequence[Callback]) -> None:
        """Refuse a directory for checkpoints that takes no files, before anything is loaded; a collective.

        Raises:
            OSError: With the directory and the reason.
        """
        for callback in callbacks:
            directory = callback.dirpath if isinstance(callback, ModelCheckpoint) else None
            if directory is not None:
                run_on_rank_zero(partial(check_writable, Path(directory), f"{type(callback).__name__}(dirpath)"))

    def start_keeping(self, trainer: "pl.Trainer") -> None:
        """Get ready for a fit: tidy up after killed runs, and make the links of `save_last="link"` from here on.

        `ModelCheckpoint` deletes the old link before it makes the new one, which would point to a directory that is not
        there yet. It is told to save `last` instead, and `links` answers.
        """
        callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        self._linking = [callback for callback in callbacks if callback.save_last == "link"]
        for callback in self._linking:
            callback.save_last = True
        if self.is_global_zero:
            for directory in {Path(callback.dirpath) for callback in callbacks if callback.dirpath}:
                with suppress(OSError):  # a directory that cannot be written is refused by the first save
                    remove_unfinished(directory)

    def stop_keeping(self) -> None:
        """Finish what is being saved, and give the callbacks back as they were.

        Raises:
            OSError: The last checkpoint could not be written, on every rank.
        """
        try:
            self.finish_saving()
        finally:
            for callback in self._linking:
                callback.save_last = "link"
            self._linking = ()

    @property
    def saves_later(self) -> bool:
        """Whether a checkpoint of now is written while training goes on: only within a fit, which can wait for it."""
        return self.async_save and self.is_fitting

    @property
    def is_fitting(self) -> bool:
        """Whether a fit is under way, and not one that an exception has ended."""
        assert self.lightning_module is not None
        state = self.lightning_module.trainer.state
        return state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING

    def finish_saving(self) -> None:
        """Wait until the checkpoints that were saved are complete; a collective.

        Raises:
            OSError: One could not be written, on every rank.
        """
        with self.phase("checkpoint save"):
            self._queue.wait()

    def keep(self, checkpoint: PendingCheckpoint) -> None:
        """Write a checkpoint: beside training within a fit, now otherwise."""
        self._newest[checkpoint.path.parent] = checkpoint.path
        if not self.saves_later:
            checkpoint.write()
            rank_zero_info(f"{checkpoint.path}: complete after {checkpoint.age_s:.2f} s.")
            return
        group, waited_s = self._own_group(), checkpoint.age_s

        def write() -> None:
            checkpoint.write(group)
            rank_zero_info(
                f"{checkpoint.path}: training waited {waited_s:.2f} s, complete after {checkpoint.age_s:.2f} s."
            )

        self._queue.submit(write, instead=checkpoint.abandon)

    def links(self, path: Path) -> bool:
        """Whether `path` is the link of a `save_last="link"`; then let it point to the last checkpoint beside it."""
        wanted = [callback for callback in self._linking if callback.save_top_k != 0]
        target = self._newest.get(path.parent)
        if target is None or not any(Path(callback.last_model_path) == path for callback in wanted):
            return False
        group = self._own_group() if self.saves_later else None

        def link() -> None:
            run_on_rank_zero(lambda: switch_link(path, target), group)
            self._remove_outlived()

        if self.saves_later:
            self._queue.submit(link)
        else:
            link()
        return True

    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Delete a checkpoint directory (rank 0), when what was saved before this call is complete."""
        path = Path(filepath)
        if self._newest.get(path.parent) == path:
            del self._newest[path.parent]
        self._when_saved(lambda: self._remove(path))

    def _when_saved(self, job: Callable[[], None]) -> None:
        """Do something when what was saved before this call is complete; never, if it cannot be written."""
        if self._queue.is_empty:
            job()
        else:
            self._queue.submit(job)

    def _remove(self, path: Path) -> None:
        if not self.is_global_zero:
            return
        if not path.is_symlink() and is_linked(path):
            self._outlived.append(path)
            return
        try:
            remove(path)
        except (OSError, ValueError) as error:  # on this rank alone, and no reason to end a run
            rank_zero_warn(f"the checkpoint {path} was not removed: {error}")

    def _remove_outlived(self) -> None:
        outlived, self._outlived = self._outlived, []
        for path in outlived:
            self._remove(path)

    def _own_group(self) -> dist.ProcessGroup:
        if self._queue_group is None:
            timeout = timedelta(seconds=self.timeout_s)
            self._queue_group = dist.new_group(backend="gloo", timeout=timeout, group_desc="SAVE_QUEUE_GROUP_GLOO")
        return self._queue_group
