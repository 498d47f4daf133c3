"""`Timeline` in real fits: its file, whatever ends the run; what it costs. Those of samplers are in tests/modules."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron_rl.callbacks.timeline import Recording, Timeline
from lightning_megatron_rl.rollout.watch import Watched
from lightning_megatron_rl.utilities.spans import Span, SpanLog
from tests.callbacks.test_trace_events import check_format, check_rows, spans
from tests.command_line import ROOT, build
from tests.training import fit_sft

ALONE = {"world_size": 1, "init_process_group": False}


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    check_format(content)
    check_rows(content)
    return content


def names(content: dict[str, Any], pid: int = 1) -> list[str]:
    return [event["name"] for event in spans(content, pid)]


def test_phases_validations_and_checkpoints_are_rows_of_each_rank(worker_pool, qwen3_dir, tmp_path):
    path = tmp_path / "new" / "timeline.json"
    saving = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=1, save_top_k=-1)
    worker_pool.run(
        fit_sft, qwen3_dir, {}, 2, steps=2, callbacks=[Timeline(str(path)), saving],
        trainer={"val_check_interval": 1, "enable_checkpointing": True}, world_size=2, init_process_group=False,
    )  # fmt: skip
    content = read(path)
    for pid in (1, 2):
        found = names(content, pid)
        assert found.count("update") == found.count("validation") == 2
        assert found.count("checkpoint save") >= 2
        assert [event["name"] for event in spans(content, pid, tid=2)] == ["step 1", "step 2"]
        updates = [event for event in spans(content, pid) if event["name"] == "update"]
        for step, update in zip(spans(content, pid, tid=2), updates, strict=True):
            assert step["ts"] <= update["ts"]
            assert update["ts"] + update["dur"] <= step["ts"] + step["dur"]
    assert sorted(file.name for file in path.parent.iterdir()) == ["timeline.json"]


def test_another_run_leaves_the_file_of_the_first(worker_pool, qwen3_dir, tmp_path):
    for _ in range(2):
        callback = Timeline(str(tmp_path / "timeline.json"))
        worker_pool.run(fit_sft, qwen3_dir, {}, 1, steps=1, callbacks=[callback], **ALONE)
    first, second = read(tmp_path / "timeline.json"), read(tmp_path / "timeline-2.json")
    assert names(first).count("update") == names(second).count("update") == 1
    assert first["otherData"]["start"] < second["otherData"]["start"]


class Ends(pl.Callback):
    """Ends the run in its second step."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1 and trainer.global_rank == 0:
            if self.how == "error":
                raise RuntimeError("no more")
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)  # the signal ends it


def interrupted(model: Path, path: Path, how: str) -> str:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        fit_sft(model, {}, 1, steps=3, callbacks=[Timeline(str(path)), Ends(how)])
    except (RuntimeError, SystemExit) as error:
        return type(error).__name__
    finally:
        signal.signal(signal.SIGINT, handler)  # which Lightning switches off
    return "nothing"


@pytest.mark.parametrize(("how", "error"), [("error", "RuntimeError"), ("interrupt", "SystemExit")])
def test_a_run_that_is_ended_leaves_a_whole_file(worker_pool, qwen3_dir, tmp_path, how, error):
    path = tmp_path / "timeline.json"
    assert worker_pool.run(interrupted, qwen3_dir, path, how, **ALONE)[0] == error
    assert names(read(path)).count("update") == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["timeline.json"]


def refused(model: Path, paths: list[Path]) -> list[str]:
    messages = []
    for path in paths:
        try:
            fit_sft(model, {}, 1, steps=1, callbacks=[Timeline(str(path))])
        except (OSError, ValueError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_a_path_that_cannot_be_written_is_refused_at_the_start(worker_pool, broken_model, tmp_path):
    """Before weights are read, which would be another error."""
    (tmp_path / "file").write_text("no directory")
    paths = [tmp_path / "file" / "timeline.json", tmp_path]
    below, directory = worker_pool.run(refused, broken_model, paths, **ALONE)[0]
    assert below.startswith(f"OSError: Timeline(path)='{paths[0]}' cannot be written: ")
    assert directory.startswith(f"ValueError: Timeline(path)='{tmp_path}' is a directory: give a file in it")


def test_the_command_line_knows_it(tmp_path):
    overlay = tmp_path / "timeline.yaml"
    overlay.write_text(
        "trainer:\n  callbacks+:\n    - {class_path: Timeline, init_args: {path: timeline.json, max_spans: 9}}\n"
    )
    built = build("fit", "--config", ROOT / "configs" / "demo" / "sft.yaml", "--config", overlay)
    (callback,) = (callback for callback in built.trainer.callbacks if isinstance(callback, Timeline))
    assert (callback.path, callback.max_spans) == ("timeline.json", 9)


def test_long_runs_keep_the_newest_and_say_what_is_missing():
    phases = SpanLog()
    recording = Recording(phases, 0, limit=3)
    for number in range(5):
        with phases.during(f"phase {number}"):
            pass
        recording.read(Watched())
        recording.add_step(number, time.monotonic(), time.monotonic())
    result = recording.result()
    assert [span.name for span in result.phases] == ["phase 2", "phase 3", "phase 4"]
    assert [number for number, _, _ in result.steps] == [2, 3, 4]
    assert result.num_dropped == 2 + 2


def test_what_was_before_the_fit_is_left_out():
    phases = SpanLog()
    with phases.during("an earlier fit"):
        time.sleep(0.001)
    recording = Recording(phases, 0, limit=9)
    with phases.during("update"):
        pass
    recording.read(Watched())
    assert [span.name for span in recording.result().phases] == ["update"]


def test_a_step_costs_next_to_nothing():
    """A step has some ten phases, and its sampler up to some hundred spans: 0.15 ms, measured."""
    phases, sampler = SpanLog(), SpanLog()
    recording = Recording(phases, 0, limit=100_000)
    began = time.perf_counter()
    for step in range(20):
        for number in range(10):
            with phases.during(f"phase {number}"):
                pass
        for _ in range(100):
            now = time.monotonic()
            sampler.add(Span("sampling", now, now, 0.0))
        recording.add_step(step, time.monotonic(), time.monotonic())
        recording.read(Watched(sampler))
    a_step = (time.perf_counter() - began) / 20
    print(f"{1e6 * a_step:.0f} us a step")
    assert a_step < 5e-3, a_step  # 0.15 ms were measured; machines are busy
