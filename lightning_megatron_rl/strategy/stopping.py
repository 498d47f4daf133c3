"""`RunStop`: signals end a run between two batches, on all ranks together, with a checkpoint."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from lightning_megatron_rl.checkpoints.keeping import CheckpointKeeper, stop_checkpoint
from lightning_megatron_rl.parallel import presence
from lightning_megatron_rl.parallel.collectives import broadcast
from lightning_megatron_rl.parallel.distributed import run_on_rank_zero
from lightning_megatron_rl.strategy.termination import StopNotice, exit_code, requeue_job
from lightning_megatron_rl.utilities.notices import tell_loss

if TYPE_CHECKING:
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy

REQUEUE_LINK = "hpc_ckpt_1.ckpt"  # where Lightning looks for a checkpoint under SLURM if it is given none


class RunStop:
    """Answers SIGTERM, SIGUSR1 and, if asked, Ctrl-C, after the batch of a fit in which they come.

    All ranks check for a signal on any rank at the end of each batch and validation, after the checkpoint callbacks.
    The checkpoint is written there, where loops, data and callbacks are between two batches. The run ends when the
    batch's metrics are logged, before a due validation or the next batch. A `trainer.should_stop` that one rank has set
    until then ends the fit on all of them: the others would wait for it.

    Args:
        strategy: Of the fit.
        keeper: Of its checkpoints.
    """

    def __init__(self, strategy: "MegatronStrategy", keeper: CheckpointKeeper) -> None:
        self._trainer = strategy.trainer
        self._keeper = keeper
        self._device = strategy.root_device
        self._phase = strategy.phase
        environment = strategy.cluster_environment
        slurm = environment if isinstance(environment, SLURMEnvironment) else None
        self._requeues = slurm is not None and slurm.auto_requeue
        self._requeue_signal: int = (slurm.requeue_signal if slurm is not None else None) or signal.SIGUSR1
        signals = [signal.SIGTERM, self._requeue_signal]
        self._notice = StopNotice([*signals, signal.SIGINT] if strategy.save_on_interrupt else signals)
        self._stopping = 0  # the signal that this run is about to end for
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        callbacks.insert(0, _CountsSteps())
        callbacks.append(_EndsOfBatches(self))  # behind all others

    def install(self) -> None:
        """Take the signals over from Lightning."""
        self._notice.install()

    def on_train_start(self) -> None:
        """End for a signal that came before, which has nothing new to save."""
        with self._phase("start of training"):
            self._stopping, _ = self._notice.agree(self._device)
        self.stop_if_told()

    def save_if_told(self) -> None:
        """Write the checkpoint of a run that was told to stop; a collective at every batch's end."""
        trainer = self._trainer
        with self._phase("end of batch"):
            told, trainer.should_stop = self._notice.agree(self._device, trainer.should_stop)
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
        self._keeper.finish()
        if self._requeues:
            root = Path(broadcast(trainer.default_root_dir))
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
        is_first = self._trainer.is_global_zero
        if self._requeues and self._stopping == self._requeue_signal and is_first:
            requeue_job()
        presence.rest()  # all ranks end now, each in its own time
        raise SIGTERMException(exit_code(self._stopping) if is_first else 0)

    def forget(self) -> None:
        """Leave the Trainer's callbacks as they were."""
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [it for it in callbacks if not isinstance(it, _EndsOfBatches | _CountsSteps)]


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
    """Calls `RunStop` at the end of batches and validations: Lightning tells callbacks only."""

    def __init__(self, stop: RunStop) -> None:
        self._stop = stop

    def on_train_batch_end(self, *_: Any) -> None:
        """Save if told to."""
        self._stop.save_if_told()

    def on_validation_start(self, trainer: "pl.Trainer", *_: Any) -> None:
        """Leave a due validation to the resumed run."""
        if not trainer.sanity_checking:
            self._stop.stop_if_told()

    def on_validation_end(self, trainer: "pl.Trainer", *_: Any) -> None:
        """Save if told to during the validation."""
        if not trainer.sanity_checking:
            self._stop.save_if_told()


def was_interrupted(module: "pl.LightningModule | None") -> bool:
    """Whether an exception has ended the run; not, if it was refused before the module had a Trainer."""
    try:
        return module is not None and bool(module.trainer.interrupted)
    except RuntimeError:  # Lightning's, of a module without one
        return False


def give_exit_code(exception: BaseException, *, is_first: bool) -> None:
    """Let an evaluation that Lightning ends for SIGTERM have a fit's exit codes; Lightning's are all 0."""
    if isinstance(exception, SIGTERMException) and exception.code is None:
        exception.code = exit_code(signal.SIGTERM) if is_first else 0


def _link_for_requeue(root: Path, path: Path) -> None:
    """Let a requeued job find `path` without a `ckpt_path`, where Lightning looks for the checkpoint it would write."""
    link, new = root / REQUEUE_LINK, root / f".{REQUEUE_LINK}.new"
    root.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        new.unlink()
    new.symlink_to(os.path.relpath(path.resolve(), root.resolve()))
    new.replace(link)
