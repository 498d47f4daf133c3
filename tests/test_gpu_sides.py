"""Sides of benchmarks that run at the same time: GPUs of their own, and the tables of what peers take."""

import fcntl
import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import ROOT

sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "scripts")]
compare: Any = importlib.import_module("compare")
gpus: Any = importlib.import_module("gpus")
peer_tables: Any = importlib.import_module("peer_tables")


@pytest.fixture
def four(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(gpus.tempfile, "gettempdir", lambda: str(tmp_path))


def test_no_two_sides_have_one_gpu(four, monkeypatch):
    """Fails without the locks: the pool starts as many sides as it may, and each would take the first GPU."""
    everybody_is_there = threading.Barrier(3, timeout=20)
    cores: dict[str, list[set[int]]] = {}  # by thread
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda _, mine: cores.setdefault(threading.current_thread().name, []).append({*mine})
    )

    def child(script: str, arguments: list[str], timeout_s: float, path: Any = (), gpus: str = "") -> dict[str, Any]:
        everybody_is_there.wait()
        return {"gpus": gpus}

    monkeypatch.setattr(compare, "run_child", child)
    with compare.Sides(3) as pool:
        runs = [pool.start("side.py", [], 1.0, devices=devices) for devices in (2, 1, 1)]
        given = [run.result()["gpus"] for run in runs]
    assert sorted(name for names in given for name in names.split(",")) == ["4", "5", "6", "7"]
    assert len(given[0].split(",")) == 2
    taken = [mine for mine, _ in cores.values()]  # two for each GPU, and none twice
    assert sorted(map(len, taken)) == [2, 2, 4]
    assert set.union(*taken) == set(range(8))
    assert all(back == set(range(8)) for _, back in cores.values())


def test_sides_at_once_want_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(gpus.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="--at-once 2: each side wants a GPU of its own, and there is none"):
        compare.Sides(2)


def test_a_gpu_is_given_back(four):
    cores = os.sched_getaffinity(0)
    for _ in range(2):
        with gpus.own_gpus(4) as names:
            assert names == "4,5,6,7"
    assert os.sched_getaffinity(0) == cores
    with pytest.raises(ValueError, match="5 GPUs for a side: there are 4"), gpus.own_gpus(5):
        pass


def test_who_wants_several_gpus_is_not_passed_by(four, tmp_path: Path):
    """Fails without the door: the one that wants a single GPU takes the free one at once."""
    order = []

    def side(count: int) -> None:
        with gpus.own_gpus(count):
            order.append(count)

    first, second = (threading.Thread(target=side, args=(count,)) for count in (2, 1))
    with gpus.own_gpus(3):
        first.start()
        deadline = time.monotonic() + 20
        with (tmp_path / "lightning_megatron_rl_benchmark_gpus/next").open("w") as door:
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(door, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    break  # the first waits
                fcntl.flock(door, fcntl.LOCK_UN)
        second.start()
        second.join(1)
        assert order == []
    first.join(20)
    second.join(20)
    assert sorted(order) == [1, 2]  # both in the end; who of them says so first is open


def test_what_is_left_of_a_comparison_does_not_start(monkeypatch):
    """Fails without the cancelling: a side that others are compared with has failed, and hours of them would follow."""
    started = []

    def child(script: str, *_: Any, **__: Any) -> dict[str, Any]:
        started.append(script)
        raise RuntimeError(f"{script} ended with 1")

    monkeypatch.setattr(compare, "run_child", child)
    hold = threading.Event()
    pool = compare.Sides()
    first = pool.start("first.py", [], 1.0)
    pool._pool.submit(hold.wait, 20)
    second = pool.start("second.py", [], 1.0)
    threading.Timer(0.2, hold.set).start()
    with pool, pytest.raises(RuntimeError, match=r"first\.py ended with 1"):
        first.result()
    assert second.cancelled()
    assert started == ["first.py"]


def test_times_are_those_of_seconds_and_of_rates():
    seconds = peer_tables.Row("a step", "s", 2.0, {"trl": 5.0, "verl": None}, False, {}, "")
    rate = peer_tables.Row("samples", "samples/s", 2.0, {"trl": 5.0, "verl": 1.0}, True, {}, "")
    assert (seconds.times("trl"), seconds.times("verl")) == (2.5, None)
    assert (rate.times("trl"), rate.times("verl")) == (0.4, 2.0)


def test_a_peer_that_is_faster_is_named(tmp_path: Path):
    side = {"step_s": {"median": 4.0}, "shape": "0.6b"}
    result = {"device": "NVIDIA H200", "date": "2026-11-26", "versions": {"trl": "1.16.0"}, "ours": side}
    content = {**result, "trl": {"step_s": {"median": 3.0}}, "verl": {"failed": "out of memory"}}
    (tmp_path / "grpo_step_h200.json").write_text(json.dumps(content))
    assert peer_tables.peer_lines(tmp_path).splitlines() == [
        "- TRL 1.16.0: 0.75 × (GRPO step, 0.6b, H200) to 0.75 × (GRPO step, 0.6b, H200) as fast, in 1 kinds of work.",
        "- Where a peer was faster: GRPO step, 0.6b, H200.",
    ]
    assert "| GRPO step, 0.6b, H200 | s | 4.00 | 3.00 (0.75 ×) | – | 2026-11-26 |" in peer_tables.peers(tmp_path)


def test_what_is_said_of_a_missing_correction_was_measured():
    """`modules/streaming.py` warns with these figures."""
    source = (ROOT / "lightning_megatron_rl" / "modules" / "streaming.py").read_text()
    result = json.loads((ROOT / "benchmarks" / "results" / "stream_curves.json").read_text())
    for name, told in (("shared, 8, no correction", "0.44 without"), ("shared, 8", "0.88 with")):
        accuracy = result["comparison"][name]["final_accuracy"]["mean"]
        assert told.startswith(f"{accuracy:.2f}")
        assert told in source


def test_rows_of_two_gpus_stand_beside_peers_on_two(tmp_path: Path):
    """A synchronous run beside TRL's, a sampler of its own beside verl's."""
    rates = {"trl": 2.0, "verl, synchronous": 4.0, "trl, two GPUs": 3.0, "verl, separate, bound 2": 5.0}
    rates |= {"verl, bound 2": 5.5, "trl, asynchronous, bound 1": 4.0}
    result: dict[str, Any] = {
        "device": "NVIDIA H200",
        "date": "2026-11-26",
        "shape": "1.7b",
        "rows": [
            {"placement": placement, "devices": devices, "max_staleness": bound, "samples_per_s": 6.0}
            for placement, devices, bound in (
                (None, 1, 0),
                (None, 2, 0),
                ("separate", 1, 1),
                ("separate", 1, 2),
                ("shared", 2, 2),  # verl has no such side on two GPUs
            )
        ],
        "peers": {name: {"samples_per_s": rate} for name, rate in rates.items()},
    }
    result["peers"]["trl, asynchronous, bound 1"]["date"] = "2026-11-27"
    (tmp_path / "long_tail_two.json").write_text(json.dumps(result))
    assert [
        line.split(" | ")[0] + line.partition("6.00")[2] for line in peer_tables.peers(tmp_path).splitlines()[2:]
    ] == [
        "| long responses, 1.7b, synchronous, H200 | 2.00 (3.00 ×) | 4.00 (1.50 ×) | 2026-11-26 |",
        "| long responses, 1.7b, synchronous, two H200s | 3.00 (2.00 ×) | – | 2026-11-26 |",
        "| long responses, 1.7b, bound of staleness 1, two H200s | 4.00 (1.50 ×) | – | 2026-11-26; TRL 2026-11-27 |",
        "| long responses, 1.7b, bound of staleness 2, two H200s | – | 5.00 (1.20 ×) | 2026-11-26 |",
    ]
