"""What a run has left: whole, half-written, of many steps, or nothing of a run."""

import json
from pathlib import Path

import numpy as np
import pytest

from lightning_megatron_rl.__main__ import main as program
from lightning_megatron_rl.report.command import main, write_report
from lightning_megatron_rl.report.page import flatten, write_page
from lightning_megatron_rl.report.run import name_runs, read_run
from lightning_megatron_rl.report.series import Series, bucket_means, downsample, smooth
from tests.report.runs import healthy, write_config, write_facts, write_run


def refused(capsys, *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err


def test_what_is_no_run_is_refused_by_what_is_missing(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    said = refused(capsys, tmp_path / "empty")
    assert all(word in said for word in ("is no run", "no metrics.csv", "CSVLogger", "none is below it"))
    run = write_run(tmp_path / "above" / "grpo")
    assert f"Runs below it: {run}" in refused(capsys, tmp_path / "above")
    assert "is a file: name the directory" in refused(capsys, run / "metrics.csv")
    assert "no such directory" in refused(capsys, tmp_path / "none")
    assert "named twice" in refused(capsys, run, run)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.csv").write_text("a,b\n1,2\n")
    assert "no column 'step'" in refused(capsys, tmp_path / "other")


def test_out_must_be_a_file_that_may_be_written(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert "is a directory" in refused(capsys, run, "--out", tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert "is no report of this command" in refused(capsys, run, "--out", tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert "is a URL" in refused(capsys, run, "--out", "s3://bucket/report.html")
    assert sorted(path.name for path in run.iterdir()) == ["hparams.yaml", "metrics.csv"]


def test_the_command_writes_into_the_run_and_again(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    for _ in range(2):  # an older report makes way
        with pytest.raises(SystemExit) as exit_:
            program(["report", str(run)])
        assert exit_.value.code == 0
        assert str(run / "report.html") in capsys.readouterr().out
    assert sorted(path.name for path in run.iterdir()) == ["hparams.yaml", "metrics.csv", "report.html"]


def test_a_half_written_run_is_read_and_says_so(tmp_path):
    run = write_run(tmp_path / "run", 12)
    whole = (run / "metrics.csv").read_text()
    (run / "metrics.csv").write_text(whole + "0.5,0.25")  # a row that was cut short
    (run / "hparams.yaml").write_text("run_id: [")
    (run / "run.json").write_text('{"ending": "fin')
    found = read_run(run)
    assert found.num_steps == 12
    said = " ".join(found.notes)
    assert "1 row(s) of metrics.csv cannot be read" in said
    assert "hparams.yaml cannot be read" in said
    assert "run.json cannot be read" in said
    assert "config.yaml" in said
    page = write_report([run]).read_text()
    assert "1 row(s) of metrics.csv cannot be read" in page


@pytest.mark.parametrize("content", [None, "", "step,reward/mean\r\n"])
def test_a_run_without_a_step_is_read(tmp_path, content):
    run = tmp_path / "run"
    run.mkdir()
    write_facts(run, ending="stopped by ValueError: too large")
    if content is not None:
        (run / "metrics.csv").write_text(content)
    found = read_run(run)
    assert found.num_steps == 0
    assert any("metrics.csv" in note for note in found.notes)
    assert "stopped by ValueError: too large" in write_report([run]).read_text()


def test_a_line_without_end_is_left_out(tmp_path):
    """As a crash of the machine may leave one: Python's reader takes no value of more than 131,072 characters."""
    (tmp_path / "metrics.csv").write_text("loss,step\n0.5,1\n" + "x" * 200_000 + "\n0.25,2\n")
    run = read_run(tmp_path)
    assert list(run.metrics["loss"].values) == [0.5, 0.25]
    assert any("1 row(s) of metrics.csv cannot be read" in note for note in run.notes)


def test_of_a_step_that_is_there_twice_the_later_row_counts(tmp_path):
    """As after a run was killed behind its checkpoint and resumed."""
    (tmp_path / "metrics.csv").write_text("step,a\n1,1.0\n2,2.0\n3,3.0\n2,20.0\n3,\n3,nan\n")
    series = read_run(tmp_path).metrics["a"]
    assert series.steps.tolist() == [1, 2, 3]
    assert series.values[:2].tolist() == [1, 20]
    assert np.isnan(series.values[2])


def test_the_log_s_warnings_are_shown_without_secrets(tmp_path):
    run = write_run(tmp_path / "run")
    lines = [f"2026-01-01 00:00:00,{place:03d} WARNING pkg: number {place}" for place in range(300)]
    secret = "2026-01-01 00:00:01,000 ERROR pkg: HF_TOKEN=abcdef"
    (run / "run.log").write_text("\n".join([*lines, "2026-01-01 00:00:02,000 INFO pkg: hello", secret]) + "\n")
    warnings = read_run(run).warnings
    assert len(warnings) == 200
    assert warnings[-1].endswith("HF_TOKEN=***")
    assert not any("hello" in line for line in warnings)


def test_names_tell_runs_apart():
    assert name_runs([Path("/a/one/grpo"), Path("/b/two/grpo")]) == ["one/grpo", "two/grpo"]
    assert name_runs([Path("/a/one"), Path("/a/two")]) == ["one", "two"]


def test_plan_and_measured_stand_side_by_side(tmp_path):
    run = write_run(tmp_path / "run", 12)
    plan = {"moment": "the trainer computes", "needed_gib": 60.5, "free_gib": 78.25, "trainer_gib": 12.5, "text": "sum"}
    write_facts(run, memory_plan=plan, table=[["layout", "tp 2 x dp 1"]], ending="finished")
    write_config(run, {"seed_everything": 4321})
    page = write_report([run]).read_text()
    for said in ("12.50 GiB", "9.97 GiB", "60.50 GiB", "78.25 GiB", "tp 2 x dp 1", "seed_everything: 4321", "2.11.0"):
        assert said in page, said


def test_settings_that_differ_are_listed(tmp_path):
    one = write_run(tmp_path / "one", model={"lr": 0.125, "same": "x"})
    two = write_run(tmp_path / "two", model={"lr": 0.25, "same": "x"})
    page = write_report([one, two], tmp_path / "both.html").read_text()
    table = page[page.index("Settings that differ") : page.index("Plan against measured")]
    assert all(said in table for said in ("model.lr", "0.125", "0.25"))
    assert "model.same" not in table
    assert flatten({"a": {"b": [1, 2]}, "c": {}}) == {"a.b": "[1, 2]", "c": "{}"}


# ---- long runs ------------------------------------------------------------------------------------------------------


def test_peaks_survive_downsampling():
    steps = np.arange(1.0, 10_001)
    values = np.sin(steps / 300)
    values[[17, 5_003, 9_998]] = [9.0, -9.0, 8.0]
    values[6_000] = np.nan
    found = downsample(Series(steps, values), 500)
    assert len(found.values) <= 500
    kept = dict(zip(found.steps, found.values, strict=True))
    assert (kept[18], kept[5_004], kept[9_999]) == (9.0, -9.0, 8.0)
    assert found.steps[0] == 1
    assert found.steps[-1] == 10_000
    assert (np.diff(found.steps) > 0).all()
    short = Series(steps[:5], values[:5])
    assert downsample(short, 500) is short


def test_an_average_follows_and_ends_where_the_values_are():
    steps = np.arange(400.0)
    flat = smooth(Series(steps, np.full(400, 3.0)))
    assert np.allclose(flat.values, 3.0)  # from the first step on
    noisy = np.random.default_rng(0).normal(2.0, 1.0, 400)
    averaged = smooth(Series(steps, noisy)).values
    assert averaged[50:].std() < noisy.std() / 3
    gap = noisy.copy()
    gap[10] = np.nan
    assert len(smooth(Series(steps, gap)).values) == 399


def test_means_of_buckets_keep_the_sum():
    values = np.arange(1_000.0)
    found = bucket_means(Series(np.arange(1_000.0), values), 8)
    assert len(found.values) == 8
    assert np.isclose(found.values.mean() * 1_000, values.sum())
    assert found.steps[-1] == 999


def test_a_run_of_ten_thousand_steps(tmp_path):
    def metrics(step: int) -> dict[str, float]:
        return {**healthy(step), "policy/grad_norm": 123.5 if step == 7_777 else 1.0 + step % 2}

    run = write_run(tmp_path / "run", 10_000, metrics)
    file = write_report([run])
    assert file.stat().st_size < 8_000_000
    text = file.read_text()
    data = json.loads(text.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])
    assert "1,500 of 10,000 steps are drawn; every peak is kept." in text
    assert "Each bar is the mean of about 50 steps." in text
    raw = [trace for figure in data["figures"] for trace in figure["data"] if trace["meta"] == "raw"]
    peaks = [decoded(trace["y"]).max() for trace in raw]
    assert 123.5 in peaks


def decoded(array: dict[str, str]) -> np.ndarray:
    import base64

    return np.frombuffer(base64.b64decode(array["bdata"]), dtype=array["dtype"])


def test_the_end_of_a_metric_is_where_its_numbers_end(tmp_path):
    def metrics(step: int) -> dict[str, float]:
        return {**healthy(step), "policy/loss": 0.5 if step <= 20 else np.nan}

    text = write_page([read_run(write_run(tmp_path / "run", 30, metrics))])
    assert "until step 20, then no number, from 0.5<" in text
    assert "policy/loss is no number in 10 of 30 steps, first in 21" in text


def test_beginning_and_end_of_a_short_run_have_no_step_in_common():
    for values, start, end in (([1, 2, 3], 1, 3), ([1, 2, 3, 4], 1.5, 3.5), ([5], 5, 5), (range(1, 8), 2, 6)):
        series = Series(np.arange(len(values)), np.array(values, dtype=float))
        assert (series.start(), series.end()) == (start, end)
