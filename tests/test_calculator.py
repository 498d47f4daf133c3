"""The calculator's benchmark in a short form: the policy gets better at using the tool within a few rollouts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MARGIN = 0.1  # of held-out accuracy, in 16 rollouts; the whole benchmark gains more


@pytest.mark.slow
@pytest.mark.deadline(900)
def test_policy_with_a_calculator_improves(tmp_path):
    results = tmp_path / "calculator.json"
    command = [sys.executable, "benchmarks/calculator.py", "--out", str(tmp_path / "run"), "--results", str(results)]
    done = subprocess.run(
        [*command, "--grpo-steps", "16"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=880, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    figures = json.loads(results.read_text())
    assert figures["before"]["turns_mean"] >= 1
    assert figures["accuracy_after"] >= figures["accuracy_before"] + MARGIN
    assert figures["validations"][-1]["step"] == 16
