"""Progress of a run on the console: steps, metrics, time left, and where its outputs are."""

import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.utilities import rank_zero_warn

from lightning_megatron_rl.callbacks.hf_export import HFExport
from lightning_megatron_rl.callbacks.rollout_samples import RolloutSamples
from lightning_megatron_rl.utilities import console
from lightning_megatron_rl.utilities.files import check_writable
from lightning_megatron_rl.utilities.ranges import COUNT, check_ranges

LOG_FILE = "run.log"
_QUALITY = ("reward/mean", "policy/loss", "loss", "critic/loss", "train/loss")  # the first that is logged, and a second
_LENGTHS = ("rollout/response_len_mean", "rollout/response_len_max")
_STREAM = ("rollout/ready", "rollout/under_way", "rollout/oldest_age", "perf/sampler_tokens_per_s")
_ACCURACY = re.compile(r"/(mean_at_\d+|\w*accuracy|\w*loss)$")  # not the ends of their intervals
_PHASES_SHOWN = 4
_VALIDATIONS_SHOWN = 4
_BAR = 20  # characters


class RunLog(Callback):
    """Puts libraries' log messages into a file beside the run's other outputs; the command line adds it."""

    def __init__(self) -> None:
        self.path: Path | None = None  # of this rank

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """All ranks come here, each with a file of its own if it has something to say."""
        directory = Path(trainer.log_dir or trainer.default_root_dir)  # the same on all ranks
        log = console.current()
        if log is not None:
            check_writable(directory, f"directory of {LOG_FILE} (trainer.default_root_dir, without a logger)")
            self.path = directory / (LOG_FILE if trainer.is_global_zero else f"run.rank{trainer.global_rank}.log")
            log.take_over()
            log.write_to(self.path)


class RunProgress(ProgressBar):
    """Progress over the whole run: on a terminal a line with a bar that is rewritten, elsewhere a line for each step.

    A line has step, share, time left, reward or loss, response lengths, seconds by phase, and what a validation after
    the step found; of a stream of rollouts also the groups that are ready and in flight, the age of the oldest, and
    tokens per second. It takes the place of Lightning's bar, which counts epochs.

    Args:
        every_n_steps: Steps from one line to the next where the output is no terminal.
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        super().__init__()
        check_ranges({"every_n_steps": COUNT}, locals(), "RunProgress.")
        self.every_n_steps = every_n_steps
        self._enabled = True
        self._started = 0.0  # of this process's first step
        self._first: tuple[int, float] | None = None  # its number, and when it was done with
        self._unsaid: int | None = None  # the last step that has no line yet
        self._validated = False  # since the last line

    def enable(self) -> None:
        """Show it again."""
        self._enabled = True

    def disable(self) -> None:
        """Show nothing."""
        self._enabled = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log where the outputs will be, and warn of a run whose weights will be nowhere."""
        self._started, self._first, self._unsaid = time.monotonic(), None, None
        if saves_nothing(trainer):
            rank_zero_warn(
                "no checkpoint will be saved: a ModelCheckpoint without settings saves after validations, and this run"
                " ends before the first one. Give it save_last: link or every_n_train_steps, or add HFExport."
            )
        for name, place in outputs(trainer):
            self._line(f"{name}: {place}")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Show the step before, whose times and validation are known by now."""
        self._tell(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Note that a step is done."""
        self._unsaid = trainer.global_step

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note that the next line has its results."""
        self._validated = not trainer.sanity_checking

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the last step, and where the outputs are."""
        self._tell(trainer, last=True)
        self._line(f"done: {trainer.global_step} steps, {duration(time.monotonic() - self._started)}")
        for name, place in outputs(trainer):
            self._line(f"{name}: {place}")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Show the last step, and what ended the run."""
        self._tell(trainer, last=True)
        self._line(f"stopped by {type(exception).__name__} after step {trainer.global_step}")

    def _tell(self, trainer: pl.Trainer, *, last: bool = False) -> None:
        step, self._unsaid = self._unsaid, None
        if step is None:
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        validated, self._validated = self._validated, False
        total = planned_steps(trainer)
        left = self._left(step, total, metrics)
        text, stays = describe(step, total, left, metrics, validated), validated or last
        if sys.stdout.isatty():
            self._rewrite(f"{bar(step, total)} {text}", stays=stays)
        elif stays or step % self.every_n_steps == 0:
            self._line(text)

    def _left(self, step: int, total: int | None, metrics: dict[str, float]) -> float | None:
        """Return the seconds to the end; in the first step the sampler starts, which is no measure of the others."""
        now = time.monotonic()
        if self._first is None:
            self._first = step, now
        first, done = self._first
        passed = metrics.get("time/step_s", now - self._started)
        seconds = (now - done) / (step - first) if step > first else passed
        return None if total is None else (total - step) * seconds

    def _line(self, text: str) -> None:
        if self._enabled:
            print(text, flush=True)

    def _rewrite(self, text: str, *, stays: bool) -> None:
        """Show a line that the next output replaces."""
        if self._enabled:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{text if stays else text[:width]}", end="\n" if stays else "\r", flush=True)


def planned_steps(trainer: pl.Trainer) -> int | None:
    """Return the steps of the whole run; None if nothing bounds them."""
    bounds = [trainer.max_steps] if trainer.max_steps >= 0 else []
    batches = trainer.num_training_batches
    if trainer.max_epochs is not None and trainer.max_epochs >= 0 and batches != float("inf"):
        bounds.append(int(batches) * trainer.max_epochs)
    return min(bounds, default=None)


def describe(step: int, total: int | None, left: float | None, metrics: dict[str, float], validated: bool) -> str:
    """Return the line of one step.

    Args:
        step: Its number, from 1.
        total: Steps of the run; None if nothing bounds them.
        left: Time to the end of the run, if that is known. # seconds
        metrics: What was logged.
        validated: Whether a validation has followed it.
    """
    parts = [f"step {step}" if total is None else f"step {step}/{total} ({100 * step // max(total, 1)}%)"]
    if left is not None:
        parts[0] += f", {duration(left)} left"
    parts += [f"{name.replace('/mean', '')} {metrics[name]:.4g}" for name in _QUALITY if name in metrics][:2]
    if _LENGTHS[0] in metrics:
        longest = f" (max {metrics[_LENGTHS[1]]:.0f})" if _LENGTHS[1] in metrics else ""
        parts.append(f"length {metrics[_LENGTHS[0]]:.1f}{longest}")
    if _STREAM[0] in metrics:
        parts.append(stream(metrics))
    if "time/step_s" in metrics:
        parts.append(f"{metrics['time/step_s']:.2f} s{phases(metrics)}")
    if validated:
        found = sorted(name for name in metrics if name.startswith("val/"))
        wanted = [name for name in found if _ACCURACY.search(name)] or found
        parts += [f"{name} {metrics[name]:.4g}" for name in wanted[:_VALIDATIONS_SHOWN]]
    return " | ".join(parts)


def stream(metrics: dict[str, float]) -> str:
    """Return what a stream of rollouts has, and how fast it gets more."""
    ready, under_way, age, rate = (metrics[name] for name in _STREAM)
    return f"ready {ready:.0f}, in flight {under_way:.0f}, oldest {age:.0f}, {rate:.0f} tokens/s"


_NO_PHASES = ("time/step_s", "time/start_s")  # the latter is of the first step, and no part of it


def phases(metrics: dict[str, float]) -> str:
    """Return the phases that took longest, in brackets; "" if there are none."""
    seconds = {
        name.removeprefix("time/").removesuffix("_s"): value
        for name, value in metrics.items()
        if name.startswith("time/") and name not in _NO_PHASES and value > 0
    }
    longest = sorted(seconds, key=lambda name: -seconds[name])[:_PHASES_SHOWN]
    return f" ({', '.join(f'{name} {seconds[name]:.2f}' for name in longest)})" if longest else ""


def outputs(trainer: pl.Trainer) -> list[tuple[str, str]]:
    """Return what the run writes, and where, as far as the Trainer's callbacks are known here."""
    found = []
    for logger in trainer.loggers:
        place = logger.log_dir or logger.save_dir
        if place is not None:
            found.append((f"metrics ({type(logger).__name__})", str(place)))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None and not saves_nothing(trainer):
            found.append(("checkpoints", str(callback.dirpath)))
        elif isinstance(callback, HFExport):
            found.append(("Hugging Face model", str(callback.dirpath)))
        elif isinstance(callback, RolloutSamples) and callback.directory is not None:
            found.append(("samples", callback.dirpath or str(callback.directory)))
        elif isinstance(callback, RunLog) and callback.path is not None:
            found.append(("log", str(callback.path)))
    return found


def saves_nothing(trainer: pl.Trainer) -> bool:
    """Return whether the run has a place for checkpoints and nothing that would save its weights, as far as is known.

    Lightning adds a `ModelCheckpoint` where the user gives none. With ``check_val_every_n_epoch: null``, which counts
    batches between validations, it saves after these alone.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    saving = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
    if not saving or any(isinstance(callback, HFExport) for callback in callbacks):
        return False
    usual = ModelCheckpoint().state_key  # it has what decides when a checkpoint is saved
    if any(callback.save_last or callback.state_key != usual for callback in saving):
        return False
    if trainer.check_val_every_n_epoch is not None or trainer.val_check_batch is None:
        return False
    batches, total = trainer.num_val_batches, planned_steps(trainer)
    if not sum(batches if isinstance(batches, list) else [batches]):
        return True
    return total is not None and trainer.val_check_batch > total


def bar(step: int, total: int | None) -> str:
    """Return a bar of characters."""
    if not total:
        return ""
    done = min(_BAR, _BAR * step // total)
    return f"[{'#' * done}{'-' * (_BAR - done)}]"


def duration(seconds: float) -> str:
    """Return a time as people write it.

    Example:
        ``duration(3725) == "1:02:05"`` and ``duration(65) == "1:05"``
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
