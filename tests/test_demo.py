"""The demo in a short form: the real thing with fewer steps, and the layout overlays on its configs."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import by_default

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run(*arguments: str, deadline: float) -> str:
    """Run a Python program of this repository; its output ends in the error if it fails."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=ENVIRONMENT, timeout=deadline, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the short demo leaves."""
    out = tmp_path_factory.mktemp("demo")
    steps = ["--sft-steps", "12", "--grpo-steps", "2"]
    (out / "output.txt").write_text(run("examples/demo/run.py", "--out", str(out / "run"), *steps, deadline=420))
    return out


@pytest.mark.deadline(450)
def test_demo_leaves_what_it_promises(demo):
    out = demo / "run"
    for path in ("curve.png", "table.txt", "grpo/checkpoints/last.ckpt/manifest.json", "grpo/hf/last/config.json"):
        assert (out / path).is_file(), path
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((out / "results.json").read_text())
    assert results["rollouts"] == 2
    assert results["peak_memory_gb"] < 12
    assert results["ran_on"] == "2 processes on a CPU"
    assert results["phase_seconds"]["start"] > 5  # a process imports torch and Megatron, another one vLLM
    assert results["phase_seconds"]["weight_sync"] < results["phase_seconds"]["start"]
    table = (demo / "output.txt").read_text()
    assert "accuracy after GRPO" in table
    assert "where the time of GRPO went" in table
    samples = (out / "grpo/samples/rollouts-dp0.jsonl").read_text().splitlines()
    assert len(samples) == 2 * 256, "as many of each step as RolloutSamples keeps by default"


def test_export_scores_the_same_in_transformers(demo):
    """Greedy accuracy by vLLM with the trainer's weights, and by Transformers with the exported ones."""
    results = json.loads((demo / "run" / "results.json").read_text())
    assert results["accuracy_export"] == results["accuracy_after"]


def test_sampler_and_trainer_agree(demo):
    """fp32 on both sides: 1e-6 is usual, 1e-4 is the project's bound."""
    with (demo / "run" / "grpo" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["mismatch/is_max"]]
    assert len(rows) == 2
    for row in rows:
        assert float(row["mismatch/abs_logp_diff"]) < 1e-5
        assert abs(float(row["mismatch/is_max"]) - 1) < 1e-4


@pytest.mark.deadline(500)  # two trainers and two samplers start on two cores, after the demo
@pytest.mark.parametrize("layout", by_default([], ["tp1", "pp2", "dp2"]))
def test_layout_overlays_train(demo, tmp_path, layout):
    """With `dp2` the second rank, which the first has started, has a sampler of its own."""
    config = tmp_path / "grpo.yaml"
    text = (demo / "run" / "grpo.yaml").read_text().replace(f"{demo}/run/grpo", f"{tmp_path}/grpo")
    config.write_text(text.replace(f"save_dir: {demo}/run", f"save_dir: {tmp_path}"))
    overlay = f"configs/layouts/{layout}.yaml"
    output = run(
        "-m", "lightning_megatron_rl", "fit", "--config", str(config), "--config", overlay,
        "--trainer.max_steps", "1", "--trainer.limit_val_batches", "0", deadline=300,
    )  # fmt: skip
    assert "loaded by Transformers, log-probs differ by at most" in output
    assert {"tp1": "tp 1 x pp 1", "pp2": "tp 1 x pp 2", "dp2": "tp 1 x pp 1 x cp 1 x dp 2"}[layout] in output


@pytest.mark.slow
def test_a_demo_leaves_other_runs_alone_and_a_failed_one_ends_without_a_traceback(tmp_path):
    """What somebody has trained from its model lies beside it; a stage that fails has said why."""
    for name in ("own_reward", "sft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step\n1\n")
    (tmp_path / "overlay.yaml").write_text("trainer: {max_stepz: 1}\n")
    done = subprocess.run(
        [sys.executable, "examples/demo/run.py", "--out", str(tmp_path), "--config", str(tmp_path / "overlay.yaml")],
        cwd=ROOT, env=ENVIRONMENT, timeout=390, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout
    assert "max_stepz" in done.stdout
    assert "Traceback" not in done.stdout
    assert (tmp_path / "own_reward" / "metrics.csv").exists()
    assert not (tmp_path / "sft").exists()
