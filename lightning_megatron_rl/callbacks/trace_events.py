"""Spans and counters in Chrome's trace-event format, which Perfetto opens.

The format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_megatron_rl.rollout.watch import GroupCounts
from lightning_megatron_rl.utilities.spans import Span

FIRST_SAMPLER = 1_000_001  # number of the row of rank 0's sampler; rank 0 itself is row 1
PHASES, STEPS, REWARDS = 1, 2, 3  # threads of a trainer's row


@dataclass
class RankTrace:
    """What one rank has seen of a run."""

    rank: int
    clock_offset: float  # wall clock - `time.monotonic` on its machine. # seconds
    phases: list[Span] = field(default_factory=list)
    steps: list[tuple[int, float, float]] = field(default_factory=list)  # (global_step at its end, began, ended)
    rewards: list[Span] = field(default_factory=list)  # beside the phases, of the stream that it leads
    sampler: list[Span] = field(default_factory=list)  # of the engine that it leads
    groups: list[GroupCounts] = field(default_factory=list)  # of the stream that it leads
    num_dropped: int = 0  # spans that are missing, the oldest

    @property
    def starts(self) -> Iterable[float]:
        """The beginnings of all that it has."""
        return (
            *(span.began for span in (*self.phases, *self.rewards, *self.sampler)),
            *(began for _, began, _ in self.steps),
            *(counts.time for counts in self.groups),
        )


def trace(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    """Return the trace of a run as the format wants it; times are microseconds since the first thing that is in it."""
    # relative to the first rank's clock: seconds since 1970 have no room for fractions of a microsecond
    wall = ranks[0].clock_offset if ranks else 0.0
    start = min((time + (rank.clock_offset - wall) for rank in ranks for time in rank.starts), default=0.0)
    events: list[dict[str, Any]] = []
    for rank in ranks:
        events += _events(rank, (rank.clock_offset - wall) - start)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"start": start + wall, "dropped_spans": sum(rank.num_dropped for rank in ranks)},
    }


def _events(rank: RankTrace, shift: float) -> list[dict[str, Any]]:
    trainer, sampler = rank.rank + 1, rank.rank + FIRST_SAMPLER
    events = [
        *_names(trainer, f"trainer rank {rank.rank}", 2 * rank.rank, {PHASES: "phases", STEPS: "steps"}),
        *(_span(trainer, PHASES, span, shift) for span in rank.phases),
        *(
            _complete(trainer, STEPS, f"step {number}", began + shift, ended + shift, {"step": number})
            for number, began, ended in rank.steps
        ),
    ]
    if rank.rewards:
        events.append(_event("M", trainer, REWARDS, "thread_name") | {"args": {"name": "rewards beside sampling"}})
        events += [_span(trainer, REWARDS, span, shift) for span in rank.rewards]
    if rank.sampler or rank.groups:
        events += _names(sampler, f"sampler of rank {rank.rank}", 2 * rank.rank + 1, {PHASES: "work"})
    events += [_span(sampler, PHASES, span, shift) for span in rank.sampler]
    for counts in rank.groups:
        values = {"ready": counts.ready, "under way": counts.under_way}
        events.append(_event("C", sampler, PHASES, "groups", counts.time + shift) | {"args": values})
    return events


def _names(process: int, name: str, place: int, threads: dict[int, str]) -> list[dict[str, Any]]:
    events = [
        _event("M", process, PHASES, "process_name") | {"args": {"name": name}},
        _event("M", process, PHASES, "process_sort_index") | {"args": {"sort_index": place}},
    ]
    for number, called in threads.items():
        events.append(_event("M", process, number, "thread_name") | {"args": {"name": called}})
    return events


def _span(process: int, thread: int, span: Span, shift: float) -> dict[str, Any]:
    more = {} if span.busy >= span.ended - span.began else {"busy_s": round(span.busy, 6)}
    if span.tokens:
        more["tokens"] = span.tokens
    return _complete(process, thread, span.name, span.began + shift, span.ended + shift, more)


def _complete(
    process: int, thread: int, name: str, began: float, ended: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    start, end = _microseconds(began), _microseconds(ended)
    return _event("X", process, thread, name) | {"ts": start, "dur": round(end - start, 3), "args": arguments}


def _event(kind: str, process: int, thread: int, name: str, at: float = 0.0) -> dict[str, Any]:
    return {"name": name, "ph": kind, "ts": _microseconds(at), "pid": process, "tid": thread}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
