"""`RunReport`: the report of a run at its end, and the facts for it that no logger has."""

import json
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_megatron_rl.callbacks.rollout_samples import RolloutSamples
from lightning_megatron_rl.parallel.distributed import run_on_rank_zero
from lightning_megatron_rl.report.command import REPORT, write_report
from lightning_megatron_rl.report.run import FACTS
from lightning_megatron_rl.strategy.megatron import MegatronStrategy
from lightning_megatron_rl.utilities.files import write_whole
from lightning_megatron_rl.utilities.masking import mask_text
from lightning_megatron_rl.utilities.notices import tell_failure


@runtime_checkable
class Described(Protocol):
    """A module that says what a run is made of; those of this package do."""

    def start_facts(self) -> dict[str, Any]:
        """Return plain data: the table at start, and the memory plan."""


class RunReport(Callback):
    """Write ``report.html`` when a fit ends or fails, into the directory of the run's first `CSVLogger`.

    The file needs nothing else and no network; ``lightning-megatron-rl report`` writes the same later. Beside it is
    ``run.json``: the table at start, the memory plan, where samples are, when the run began, and how it ended. A
    resumed run replaces both. A run that SIGTERM stops writes ``run.json`` alone: it is to be resumed. Without a
    `CSVLogger`, and under another strategy than `MegatronStrategy`, nothing is written.

    A report that cannot be written is an error in the log, and the run ends with one (`RunFailedError`): training, its
    checkpoints and exports are complete by then. The command line adds this callback unless the config has one.

    Args:
        at_end: Write a report when the fit ends.
        on_failure: Write one when it fails.
    """

    def __init__(self, at_end: bool = True, on_failure: bool = True) -> None:
        self.at_end = at_end
        self.on_failure = on_failure
        self._facts: dict[str, Any] = {}  # of a fit whose directory is known

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the time; under another strategy, which leaves the directory to earlier runs, nothing is written."""
        is_ours = isinstance(trainer.strategy, MegatronStrategy)
        self._facts = {"began": _now()} if is_ours and stage == "fit" else {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write down what the run is made of, once."""
        if not self._facts or "run" in self._facts or not trainer.is_global_zero:
            return
        self._facts["run"] = trainer.strategy.run_id  # type: ignore[attr-defined]
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._facts["samples"] = [str(it.directory) for it in callbacks if isinstance(it, RolloutSamples)]
        if isinstance(pl_module, Described):
            self._facts |= pl_module.start_facts()
        try:
            self._write_facts(trainer)
        except OSError as error:
            tell_failure(f"RunReport: {FACTS} was not written: {error}")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the report on rank 0; all ranks wait, and all know if it failed."""
        if not self._facts:
            return
        self._facts["ending"] = f"finished {_now()}"
        error = run_on_rank_zero(partial(self._attempt, trainer, self.at_end))
        if error is not None:
            tell_failure(error, aloud=trainer.is_global_zero)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the report on rank 0, whatever the others do."""
        if not trainer.is_global_zero or not self._facts:  # before that the directory may be another run's
            return
        said = mask_text(str(exception)).strip()
        self._facts["ending"] = f"stopped {_now()} by {type(exception).__name__}{f': {said[:2_000]}' if said else ''}"
        error = self._attempt(trainer, self.on_failure and not isinstance(exception, SIGTERMException))
        if error is not None:
            tell_failure(error)

    def _attempt(self, trainer: pl.Trainer, report: bool) -> str | None:
        """Write both files, or the facts alone; return what failed."""
        logger = _logger(trainer)
        if logger is None:
            if report:
                rank_zero_info(
                    "RunReport: no report, since the run has no CSVLogger: add one to trainer.logger for it."
                )
            return None
        try:
            logger.save()  # what waits in memory
            self._write_facts(trainer)
            if report:
                rank_zero_info(f"report: {write_report([logger.log_dir])}")
        except Exception as error:  # whatever it is, the run has done its work
            return (
                f"RunReport FAILED: {Path(logger.log_dir) / REPORT} was not written: {type(error).__name__}: {error}."
                f" Everything else of the run is complete: `lightning-megatron-rl report {logger.log_dir}` tries again."
            )
        finally:
            self._facts = {}
        return None

    def _write_facts(self, trainer: pl.Trainer) -> None:
        logger = _logger(trainer)
        if logger is None:
            return
        path = Path(logger.log_dir) / FACTS
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({**self._facts, "step": trainer.global_step}, indent=1, default=str))


def _logger(trainer: pl.Trainer) -> CSVLogger | None:
    return next((logger for logger in trainer.loggers if isinstance(logger, CSVLogger)), None)


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
