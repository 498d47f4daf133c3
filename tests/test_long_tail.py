"""B4: its simulation, and what its rows are called and held to."""

import argparse
import importlib
import sys
from typing import Any

import pytest

from lightning_megatron_rl.rollout.stream import StreamPlan
from lightning_megatron_rl.sample import Prompt
from tests.command_line import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))


class Given:
    """Lengths by a prompt's first token; each response is as long."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __call__(self, prompt: list[int], place: int) -> int:
        return self.lengths[prompt[0]]


def simulated(
    lengths: Given, batch: int, bound: int, *, separate: bool, prefill: float = 1e9, parts: int = 1, replicas: int = 1
) -> list[float]:
    """Seconds of each step of groups of one response, of which a token takes a second and 0.5 more for each other."""
    simulation: Any = importlib.import_module("stream_simulation")
    rates = simulation.Rates([1, 3], [1.0, 2.0], prefill, train_s=10.0)
    prompts = [Prompt([index], "", index=index) for index in range(len(lengths.lengths))]
    plans = [StreamPlan(batch, bound, batch * (bound + 1), 1, parts) for _ in range(replicas)]
    return simulation.simulate(plans, prompts, lengths, rates, separate=separate)


def test_simulation_by_hand():
    # both for 2 tokens, one for 4 more; then training
    assert simulated(Given(2, 6), 2, 0, separate=False) == pytest.approx([2 * 1.5 + 4 + 10])
    lengths = Given(2, 6, 4, 4)
    # the long one has had 2 tokens when the first step is over, the second one begins when there is a place for it
    shared = simulated(lengths, 1, 1, separate=False)
    assert shared[0] == pytest.approx(2 * 1.5 + 10)
    assert sum(simulated(lengths, 1, 0, separate=False)) == pytest.approx(16 + 40)
    # while the trainer works, the sampler does everything that it may begin
    beside = simulated(lengths, 1, 1, separate=True)
    assert beside[0] == pytest.approx(2 * 1.5 + 10)
    assert beside[1] == pytest.approx(10.0)
    assert sum(beside) < sum(shared) < 16 + 40
    # a prompt and what was drawn before an update are computed again: three tokens, at two seconds each
    again = simulated(lengths, 1, 1, separate=False, prefill=0.5)
    assert again[1] == pytest.approx(shared[1] + 6)
    # half of a batch is trained on while the other one has 28 tokens before it
    assert simulated(Given(2, 30), 2, 1, separate=True) == pytest.approx([2 * 1.5 + 28 + 10])
    assert simulated(Given(2, 30), 2, 1, separate=True, parts=2) == pytest.approx([2 * 1.5 + 28 + 5])
    # the first replica is ready after 3 seconds, the other after 18; meanwhile the first one draws 15 tokens more
    both = simulated(Given(2, 12, 30, 20), 1, 1, separate=False, replicas=2)
    assert both == pytest.approx([12 * 1.5 + 10, (30 - 2 - 15) + 10])


def test_the_row_that_measured_rates_need_not_be_the_first():
    """Rows that are resumed are sorted in between those that are there."""
    long_tail: Any = importlib.import_module("long_tail")
    assert long_tail.known_rates([{"rates": None}, {"rates": {"sizes": [1]}}]) == {"sizes": [1]}
    assert long_tail.known_rates([{"rates": None}]) is None
    assert long_tail.known_rates([]) is None


def test_a_result_that_is_continued_names_the_runs_before():
    long_tail: Any = importlib.import_module("long_tail")
    first = {"command": "a", "date": "2026-11-29", "rows": []}
    second = {"command": "b", "date": "2026-11-30", "earlier": long_tail.earlier_runs(first)}
    assert long_tail.earlier_runs(second) == [
        {"command": "a", "date": "2026-11-29"},
        {"command": "b", "date": "2026-11-30"},
    ]


def test_goals_of_a_long_tail_by_hand():
    long_tail: Any = importlib.import_module("long_tail")
    rows = [
        {"max_staleness": 0, "placement": None, "devices": 1, "samples_per_s": 10.0, "speedup": 1.0},
        {"max_staleness": 1, "placement": "shared", "devices": 1, "samples_per_s": 12.9, "speedup": 1.29},
        {"max_staleness": 2, "placement": "shared", "devices": 1, "samples_per_s": 15.0, "speedup": 1.5},
    ]
    others = {"trl": {"samples_per_s": 8.0}, "verl, bound 1": {"samples_per_s": 10.0}}
    others["verl, synchronous"] = {"failed": ""}
    assert long_tail.goals(rows, "cuda", others) == [
        {"side": "shared, bound 1", "goal": 1.3, "reached": 1.29, "ok": False},
        {"side": "shared, bound 1, against verl, bound 1", "goal": 1.3, "reached": 1.29, "ok": False},
        {"side": "shared, bound 2", "goal": 1.45, "reached": 1.5, "ok": True},
        {"side": "shared, bound 2, against trl", "goal": 1.8, "reached": 15.0 / 8.0, "ok": True},
    ]
    assert long_tail.goals(rows, "cpu", {}) == []
    assert len(long_tail.goals(rows, "cuda", {"trl": {"failed": "out of memory"}})) == 2


def test_a_peer_that_samples_for_several_steps_is_measured_over_whole_periods():
    """Of 7 steps that sample every third time, 6 are a rate; a part of a period is where there is no whole one."""
    long_tail: Any = importlib.import_module("long_tail")
    assert long_tail.whole_periods([12.0, 3.0, 3.0, 15.0, 3.0, 3.0, 12.0], 3) == [12.0, 3.0, 3.0, 15.0, 3.0, 3.0]
    assert long_tail.whole_periods([4.0, 5.0], 1) == [4.0, 5.0]
    assert long_tail.whole_periods([4.0, 5.0], 5) == []


def test_replicas_are_held_to_what_runs_on_as_many_gpus():
    long_tail: Any = importlib.import_module("long_tail")
    alone = {"max_staleness": 0, "placement": None, "speedup": 1.0}
    rows = [{**alone, "devices": 1, "samples_per_s": 6.0}, {**alone, "devices": 2, "samples_per_s": 10.0}]
    rows.append({"max_staleness": 2, "placement": "shared", "devices": 2, "samples_per_s": 21.0, "speedup": 2.1})
    others = {"trl": {"samples_per_s": 2.0}, "trl, two GPUs": {"samples_per_s": 7.0}}
    others["verl, bound 2"] = {"samples_per_s": 9.0}  # on one GPU
    others["verl, separate, bound 2"] = {"samples_per_s": 17.5}
    assert long_tail.goals(rows, "cuda", others)[-3:] == [
        {"side": "shared on 2 devices, bound 2", "goal": 2.0, "reached": 2.1, "ok": True},
        {
            "side": "shared on 2 devices, bound 2, against verl, separate, bound 2",
            "goal": 1.3,
            "reached": 1.2,
            "ok": False,
        },
        {"side": "shared on 2 devices, bound 2, against trl, two GPUs", "goal": 2.6, "reached": 3.0, "ok": True},
    ]
    side, apart = long_tail.Side("shared", 2, 2), long_tail.Side("separate", 2, 1)
    assert long_tail.synchronous(rows, side, on_cuda=True) is rows[1]
    assert long_tail.synchronous(rows, apart, on_cuda=True) is rows[1]
    assert long_tail.synchronous(rows, apart, on_cuda=False) is rows[0], "a trainer on both cores"

    options = argparse.Namespace(device="cuda", servers=[0], on_update=["kept"], parts=[8])
    todo = long_tail.wanted(options, ["replicas"], [2, 4], [])
    assert [(one.bound, one.devices, one.parts) for one in todo] == [(0, 2, 1), (2, 2, 1), (4, 2, 1)]
    sides = long_tail.peer_sides(["trl", "verl"], [2], ["replicas"])
    assert list(sides) == ["trl, two GPUs", "trl, asynchronous, bound 2", "verl, separate, bound 2"]
    assert "--mode=separate_async" in sides["verl, separate, bound 2"]


def test_rows_of_other_samplers_have_names_of_their_own():
    long_tail: Any = importlib.import_module("long_tail")
    row = {"max_staleness": 2, "placement": "separate", "devices": 1}
    told = {"servers": 2, "on_update": "kept"}
    assert long_tail.name(row) == "separate, bound 2"
    assert long_tail.name({**row, **told}) == "separate, bound 2, 2 servers, caches kept"
    assert long_tail.name({**row, "max_staleness": 0, "devices": 2}) == "synchronous on 2 devices"

    options = argparse.Namespace(device="cuda", servers=[0, 2], on_update=["recomputed", "kept"], parts=[1])
    rows = [{"max_staleness": 0, "placement": None, "devices": 2}, row]
    todo = long_tail.wanted(options, ["separate"], [2], rows)
    assert [(side.on_update, side.servers) for side in todo] == [("kept", 0), ("recomputed", 2), ("kept", 2)]
    rows += [{**row, "on_update": side.on_update, "servers": side.servers} for side in todo]
    assert long_tail.wanted(options, ["separate"], [2], rows) == []
    more = long_tail.wanted(options, ["separate"], [4, 1], rows)
    assert [side.bound for side in more] == [4, 1] * 4, "a sampler at all bounds, then the next"
    options.servers, options.on_update, options.parts = [0], ["kept"], [1, 8]
    in_parts = {**row, "on_update": "kept", "parts": 8}
    assert [side.parts for side in long_tail.wanted(options, ["separate"], [2], [rows[0], in_parts])] == [1]
    assert long_tail.name(in_parts) == "separate, bound 2, caches kept, batches in 8 parts"
