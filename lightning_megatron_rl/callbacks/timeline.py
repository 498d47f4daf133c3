"""`Timeline`: what trainer and samplers did when, as a file for Perfetto."""

import json
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info

from lightning_megatron_rl.callbacks.trace_events import RankTrace, trace
from lightning_megatron_rl.parallel.distributed import run_and_finish, run_on_rank_zero
from lightning_megatron_rl.rollout.watch import GroupCounts, StreamWatch, Watched
from lightning_megatron_rl.strategy.required import require_megatron
from lightning_megatron_rl.utilities.files import check_writable, create, numbered, write_whole
from lightning_megatron_rl.utilities.notices import tell_loss
from lightning_megatron_rl.utilities.ranges import COUNT, check_ranges
from lightning_megatron_rl.utilities.spans import Reader, Span, SpanLog
from lightning_megatron_rl.utilities.text_files import user_path


class Timeline(Callback):
    """Write a timeline of a fit: open the file in https://ui.perfetto.dev or in chrome://tracing.

    Each rank of the trainer is a row with its phases (waiting for a rollout, rewards, log-probs, update, weight sync,
    validation, checkpoint, ...) and steps; each sampler is one with the times in which it sampled, took weights, slept
    and woke, and the groups that were ready and under way. The file is written when the fit ends, also by an error or
    Ctrl-C: then each rank writes its own rows (``timeline.rank1.json``), since others may be gone. A file that is there
    stays; the new one is ``timeline-2.json`` and so on.

    Args:
        path: The file, such as ``timeline.json``.
        max_spans: Spans, steps and changes of counters that each row of a rank keeps; of longer runs the oldest are
            left out, which is said at the end and in the file (``otherData``).

    Raises:
        ValueError: `max_spans` is no count; when the run starts: `path` is a directory or a URL.
        OSError: When the run starts: `path` cannot be written.
    """

    def __init__(self, path: str, max_spans: int = 100_000) -> None:
        check_ranges({"max_spans": COUNT}, locals(), "Timeline.")
        self.path = path
        self.max_spans = max_spans
        self._recording: Recording | None = None
        self._step_began = self._validation_began = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the path, and begin."""
        if stage != "fit":
            return
        strategy = require_megatron(trainer, self)
        run_on_rank_zero(partial(_check_file, user_path(self.path)))
        self._recording = Recording(strategy.spans, trainer.global_rank, self.max_spans)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A step begins, with the weight sync before its rollout."""
        self._step_began = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep what the step has brought."""
        assert self._recording is not None
        self._recording.add_step(trainer.global_step, self._step_began, time.monotonic())
        self._recording.read(_watched(pl_module))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the time."""
        self._validation_began = time.monotonic()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the validation."""
        if self._recording is not None:
            began, ended = self._validation_began, time.monotonic()
            self._recording.add_phase(Span("validation", began, ended, ended - began))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Write one file for all ranks; a collective."""
        run_and_finish(partial(self._finish, pl_module), partial(_write, user_path(self.path)))

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Write the rows of this rank, without the others."""
        if self._recording is None:  # it failed before
            return
        mine, path = self._finish(pl_module), user_path(self.path)
        try:
            _write(path if mine.rank == 0 else path.with_name(f"{path.stem}.rank{mine.rank}{path.suffix}"), [mine])
        except OSError as error:  # the exception that ends the run is what matters
            tell_loss(f"Timeline: {path} was not written: {error}")

    def _finish(self, pl_module: Any) -> RankTrace:
        """Return what this rank has, and record no more."""
        recording, self._recording = self._recording, None
        assert recording is not None
        recording.read(_watched(pl_module))
        return recording.result()


class Recording:
    """Collects what one rank has seen of a fit.

    Args:
        phases: Of the rank.
        rank: Its number.
        limit: Entries that each list keeps.
    """

    def __init__(self, phases: SpanLog, rank: int, limit: int) -> None:
        self._rank = rank
        self._began = time.monotonic()
        self._clock_offset = time.time() - self._began
        self._readers: dict[int, tuple[SpanLog, Reader]] = {}  # by the log's id, for which the log is kept
        self._phases_log = phases
        self._phases = Kept[Span](limit)
        self._rewards = Kept[Span](limit)
        self._sampler = Kept[Span](limit)
        self._steps = Kept[tuple[int, float, float]](limit)
        self._groups = Kept[GroupCounts](limit)

    def add_phase(self, span: Span) -> None:
        """Keep a phase that the rank's log does not have."""
        self._phases.extend([span])

    def add_step(self, number: int, began: float, ended: float) -> None:
        """Keep a step."""
        self._steps.extend([(number, began, ended)])

    def read(self, watched: Watched) -> None:
        """Keep what has come since the last call."""
        self._phases.extend(self._news(self._phases_log))
        if watched.sampler is not None:
            self._sampler.extend(self._news(watched.sampler))
        if watched.groups is not None:
            self._groups.extend(self._changes(watched.groups))
            self._rewards.extend(self._news(watched.groups.rewards))

    def _news(self, log: SpanLog) -> list[Span]:
        """Return what a log has got since the last call, and since this recording began."""
        _, reader = self._readers.setdefault(id(log), (log, Reader(log)))
        return [span for span in reader.read() if span.began >= self._began]

    def _changes(self, watch: StreamWatch) -> list[GroupCounts]:
        return watch.since(self._groups.entries[-1].time if self._groups.entries else self._began)

    def result(self) -> RankTrace:
        """Return what was kept, in the order of time."""
        dropped = [kept.num_dropped for kept in (self._phases, self._steps, self._rewards, self._sampler, self._groups)]
        unread = [reader.num_lost for _, reader in self._readers.values()]
        return RankTrace(
            self._rank,
            self._clock_offset,
            phases=sorted(self._phases.entries, key=lambda span: (span.began, -span.ended)),
            steps=list(self._steps.entries),
            rewards=list(self._rewards.entries),
            sampler=list(self._sampler.entries),
            groups=list(self._groups.entries),
            num_dropped=sum((*dropped, *unread)),
        )


@runtime_checkable
class Watchable(Protocol):
    """A module that has more to show than phases; those of this package have."""

    def watched(self) -> Watched:
        """Return what this rank can be watched by."""


def _watched(module: Any) -> Watched:
    return module.watched() if isinstance(module, Watchable) else Watched()


class Kept[T]:
    """The newest entries of a list, and how many older ones were dropped."""

    def __init__(self, limit: int) -> None:
        self.entries: deque[T] = deque(maxlen=limit)
        self.num_dropped = 0

    def extend(self, entries: Sequence[T]) -> None:
        """Add entries behind those that are there."""
        before = len(self.entries)
        self.entries.extend(entries)
        self.num_dropped += before + len(entries) - len(self.entries)


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"Timeline(path)={str(path)!r} is a directory: give a file in it, such as timeline.json.")
    check_writable(path.parent if path.exists() else path, "Timeline(path)")


def _write(path: Path, ranks: Sequence[RankTrace]) -> None:
    """Write a file that is whole whenever it is there, under the first free name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = trace(ranks)
    place = next(place for place in numbered(path) if create(place))
    try:
        write_whole(place, json.dumps(content))
    except OSError:
        place.unlink(missing_ok=True)  # it is empty
        raise
    dropped = content["otherData"]["dropped_spans"]
    left_out = f"; the oldest {dropped} spans are left out (max_spans)" if dropped else ""
    rank_zero_info(f"Timeline: {place}{left_out}.")
