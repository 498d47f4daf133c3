"""Chrome's trace-event format: what every event has, and one clock for rows of several processes."""

import json
from typing import Any

import pytest

from lightning_megatron_rl.callbacks.trace_events import FIRST_SAMPLER, RankTrace, trace
from lightning_megatron_rl.rollout.watch import GroupCounts
from lightning_megatron_rl.utilities.spans import Span

# of each kind of event, by the format's description; viewers ignore an event, or a whole file, without them
REQUIRED = {
    "X": {"name": str, "ts": (int, float), "dur": (int, float), "pid": int, "tid": int},
    "C": {"name": str, "ts": (int, float), "pid": int, "args": dict},
    "M": {"name": str, "pid": int, "args": dict},
}


def check_format(content: dict[str, Any]) -> None:
    """Every event has what its kind asks for, and every row a name."""
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    events = content["traceEvents"]
    for event in events:
        for name, kind in REQUIRED[event["ph"]].items():
            assert isinstance(event[name], kind), event
        assert event.get("ts", 0) >= 0, event
        assert event.get("dur", 0) >= 0, event
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values()), event
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    assert named == {event["pid"] for event in events}
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= threads


def spans(content: dict[str, Any], pid: int, tid: int = 1) -> list[dict[str, Any]]:
    return [event for event in content["traceEvents"] if (event["ph"], event["pid"], event["tid"]) == ("X", pid, tid)]


def check_rows(content: dict[str, Any]) -> None:
    """Within a row a span begins behind the end of the one before, or lies inside of one."""
    for pid, tid in {(event["pid"], event["tid"]) for event in content["traceEvents"] if event["ph"] == "X"}:
        around: list[float] = []  # ends of the spans that are open
        for event in sorted(spans(content, pid, tid), key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while around and around[-1] <= event["ts"] + 0.01:  # microseconds: sums of rounded numbers
                around.pop()
            assert not around or end <= around[-1] + 0.01, event
            around.append(end)


def rank(number: int, offset: float) -> RankTrace:
    return RankTrace(
        number,
        offset,
        phases=[Span("update", 12.0, 13.5, 1.5), Span("validation", 14.0, 16.0, 2.0), Span("rollout", 14.5, 15.0, 0.5)],
        steps=[(1, 10.0, 13.75)],
        rewards=[Span("reward", 10.75, 11.0, 0.25)],
        sampler=[Span("sampling", 10.0, 11.0, 0.75, 8), Span("update", 11.0, 11.5, 0.5)],
        groups=[GroupCounts(10.5, 0, 4), GroupCounts(11.0, 1, 3)],
        num_dropped=2 * number,
    )


def test_every_event_has_what_the_format_asks_for():
    content = trace([rank(0, 1000.0), rank(1, 2000.0)])
    check_format(content)
    check_rows(content)


def test_times_are_microseconds_of_one_clock():
    """The second machine was started a thousand seconds later, and all happened a second later there."""
    content = trace([rank(0, 2000.0), rank(1, 2001.0)])
    update, validation, _ = spans(content, 1)
    assert (update["ts"], update["dur"]) == (2e6, 1.5e6)
    assert validation["ts"] == 4e6
    (step,) = spans(content, 2, tid=2)
    assert (step["name"], step["ts"], step["args"]) == ("step 1", 1e6, {"step": 1})
    (reward,) = spans(content, 1, tid=3)
    assert (reward["name"], reward["ts"]) == ("reward", 0.75e6)
    sampling, _ = spans(content, FIRST_SAMPLER)
    assert (sampling["ts"], sampling["dur"]) == (0.0, 1e6)
    assert sampling["args"] == {"busy_s": 0.75, "tokens": 8}
    counters = [event for event in content["traceEvents"] if event["ph"] == "C" and event["pid"] == FIRST_SAMPLER]
    assert [(event["ts"], event["args"]) for event in counters] == [
        (0.5e6, {"ready": 0, "under way": 4}),
        (1e6, {"ready": 1, "under way": 3}),
    ]
    assert content["otherData"] == {"start": 2010.0, "dropped_spans": 2}


def test_a_rank_that_leads_no_sampler_has_no_row_of_one():
    content = trace([RankTrace(0, 0.0, phases=[Span("update", 1.0, 2.0, 1.0)])])
    check_format(content)
    assert {event["pid"] for event in content["traceEvents"]} == {1}
    check_format(trace([]))


@pytest.mark.parametrize("outside", [Span("rollout", 15.0, 17.0, 2.0)])
def test_an_overlap_would_be_seen(outside):
    mine = rank(0, 0.0)
    mine.phases.append(outside)
    with pytest.raises(AssertionError):
        check_rows(trace([mine]))
