"""What the console shows of a run: a line for each step, the time that is left, and where the outputs are."""

import os
import pty
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron_rl.callbacks.hf_export import HFExport
from lightning_megatron_rl.callbacks.rollout_samples import RolloutSamples
from lightning_megatron_rl.callbacks.run_progress import RunProgress, bar, describe, duration, outputs, planned_steps
from tests.training import fit_sft

ALONE = {"init_process_group": False}
METRICS = {
    "reward/mean": 0.4375,
    "policy/loss": 1.5e-3,
    "rollout/response_len_mean": 5.25,
    "rollout/response_len_max": 6.0,
    "time/step_s": 12.5,
    "time/start_s": 33.0,  # of the first step, and no part of any
    "time/rollout_s": 8.0,
    "time/update_s": 3.0,
    "val/sums/mean_at_1": 0.48,
    "val/sums/mean_at_1_high": 0.5,
}


def test_a_line_has_what_matters():
    line = describe(9, 90, 1012.5, METRICS, validated=False)
    assert line == (
        "step 9/90 (10%), 16:52 left | reward 0.4375 | policy/loss 0.0015 | length 5.2 (max 6)"
        " | 12.50 s (rollout 8.00, update 3.00)"
    )
    assert describe(9, 90, 0.0, METRICS, validated=True).endswith(" | val/sums/mean_at_1 0.48")
    assert describe(3, None, None, {"loss": 2.0}, validated=False) == "step 3 | loss 2"


def test_a_stream_says_what_it_has():
    groups = {"rollout/ready": 1.0, "rollout/under_way": 7.0, "rollout/oldest_age": 2.0}
    metrics = METRICS | groups | {"perf/sampler_tokens_per_s": 1234.5}
    line = describe(9, 90, 1012.5, metrics, validated=False)
    assert " | length 5.2 (max 6) | ready 1, in flight 7, oldest 2, 1234 tokens/s | 12.50 s (" in line


@pytest.mark.parametrize(
    ("max_steps", "max_epochs", "batches", "expected"),
    [
        (90, -1, 4, 90),
        (-1, 3, 10, 30),
        (20, 3, 10, 20),
        (-1, -1, 10, None),
        (-1, 2, float("inf"), None),
        (5, None, 9, 5),
    ],
)
def test_the_whole_run_is_counted(max_steps, max_epochs, batches, expected):
    """Lightning's bar counts an epoch, and writes -2 where there is no number of them."""
    trainer: Any = SimpleNamespace(max_steps=max_steps, max_epochs=max_epochs, num_training_batches=batches)
    assert planned_steps(trainer) == expected


def test_numbers_as_people_write_them():
    assert (duration(59.6), duration(3725), duration(0)) == ("1:00", "1:02:05", "0:00")
    assert (bar(5, 10), bar(12, 10), bar(3, None)) == ("[##########----------]", f"[{'#' * 20}]", "")
    with pytest.raises(ValueError, match="every_n_steps=0"):
        RunProgress(every_n_steps=0)


def test_time_left_does_not_count_the_start_of_the_sampler(monkeypatch):
    """A resumed run of 14 steps, whose fifth took 10 of the first 90 s; later ones take 12 s."""
    progress = RunProgress()
    now = 90.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    assert progress._left(5, 14, {"time/step_s": 10.0}) == 90.0
    now = 126.0
    assert progress._left(8, 14, {"time/step_s": 10.0}) == 6 * 12.0
    assert progress._left(9, None, {}) is None


def test_outputs_are_named(tmp_path):
    samples = RolloutSamples()  # without a dirpath
    samples.directory = tmp_path / "logs" / "samples"
    callbacks = [ModelCheckpoint(dirpath=tmp_path / "checkpoints"), HFExport(str(tmp_path / "hf")), samples]
    trainer: Any = SimpleNamespace(loggers=[CSVLogger(tmp_path, "logs", "")], callbacks=callbacks)
    assert [place for _, place in outputs(trainer)] == [
        str(tmp_path / "logs") + "/", str(tmp_path / "checkpoints"), str(tmp_path / "hf"), str(samples.directory),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("interval", "limit", "options", "is_lost"),
    [
        (4, 1.0, {}, True),  # the run has three steps
        (3, 1.0, {}, False),
        (2, 0, {}, True),
        (4, 1.0, {"save_last": "link"}, False),
        (4, 1.0, {"every_n_train_steps": 2}, False),
    ],
)
def test_a_run_that_saves_nothing_says_so(worker_pool, qwen3_dir, tmp_path, interval, limit, options, is_lost):
    trainer = {"val_check_interval": interval, "limit_val_batches": limit}
    arguments = (qwen3_dir, tmp_path, trainer, options)
    told, shown, files = worker_pool.run(fit_with_default_checkpoints, *arguments, world_size=1, **ALONE)[0]
    assert told == is_lost
    assert ("checkpoints" in shown) != is_lost
    assert bool(files) != is_lost


def fit_with_default_checkpoints(
    model: Path, directory: Path, trainer: dict[str, Any], options: dict[str, Any]
) -> tuple[bool, list[str], list[str]]:
    """Whether a fit of three steps warns, what it says of outputs, and the checkpoints that it leaves."""
    callbacks = [Outputs(), *([ModelCheckpoint(directory / "checkpoints", **options)] if options else [])]
    usual = {"enable_checkpointing": True, "enable_progress_bar": True, "check_val_every_n_epoch": None}
    trainer = {**usual, "default_root_dir": directory, **trainer}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_sft(model, {}, 1, steps=3, callbacks=[RunProgress(), *callbacks], trainer=trainer)
    told = any("no checkpoint will be saved" in str(warning.message) for warning in caught)
    return told, callbacks[0].names, [path.name for path in (directory / "checkpoints").glob("*.ckpt")]


class Outputs(Callback):
    """Keeps the names of a run's outputs."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.names = [name for name, _ in outputs(trainer)]


def said(model: Path, world_size: int, *, terminal: bool) -> str:
    """What a fit of three steps with two validations prints, to a file or to a terminal."""
    reading, writing = pty.openpty() if terminal else os.pipe()
    kept = os.dup(1)
    os.dup2(writing, 1)
    os.close(writing)
    try:
        fit_sft(
            model, {}, world_size, steps=3, callbacks=[RunProgress()],
            trainer={"enable_progress_bar": True, "val_check_interval": 1},
        )  # fmt: skip
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    os.set_blocking(reading, False)
    found = b""
    try:
        while part := os.read(reading, 65536):
            found += part
    except OSError:  # nothing more
        pass
    os.close(reading)
    return found.decode()


def test_a_run_in_a_log_and_on_a_terminal(worker_pool, qwen3_dir):
    """One rank speaks; in a log each step is a line, on a terminal the line is rewritten until a validation."""
    first, second = worker_pool.run(said, qwen3_dir, 2, terminal=False, world_size=2, init_process_group=False)
    lines = [line for line in first.splitlines() if line.startswith("step ")]
    assert [line.split(",")[0] for line in lines] == ["step 1/3 (33%)", "step 2/3 (66%)", "step 3/3 (100%)"]
    for line in lines:
        assert re.search(r" left \| policy/loss [\d.e-]+ \| [\d.]+ s \(update [\d.]+", line), line
    assert re.search(r"^done: 3 steps, \d+:\d\d$", first, re.MULTILINE)
    assert "Epoch" not in first
    assert "\033" not in first
    assert "step " not in second
    shown, _ = worker_pool.run(said, qwen3_dir, 2, terminal=True, world_size=2, init_process_group=False)
    assert "\r\033[K[######--------------] step 1/3 (33%)" in shown
    assert "[####################] step 3/3 (100%)" in shown
