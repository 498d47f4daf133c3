"""Kill drills, in their short form: what is resumed after SIGKILL is the run, bit by bit, and nothing is left of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import ROOT
from tests.distributed import CHILD_PATH
from tests.drills.job import differences
from tests.drills.points import DRILLS, SHORT, VLLM_DRILLS


def report(out: Path, *options: str, timeout: float) -> list[dict[str, object]]:
    """What the drills have found."""
    command = [sys.executable, "-m", "tests.drills.kill", *options, "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": CHILD_PATH, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert out.is_file(), ended.stderr[-3000:]
    return json.loads(out.read_text())["drills"]


def test_a_killed_run_resumes_as_itself(tmp_path):
    """One rank behind an optimizer step; then the other one when its next checkpoint is all but complete."""
    found = report(tmp_path / "report.json", "--short", timeout=240)
    assert [line["problems"] for line in found] == [[]] * len(SHORT)
    assert all(line["steps_done_again"] for line in found)


@pytest.mark.slow
@pytest.mark.deadline(1500)
def test_every_point(tmp_path):
    found = report(tmp_path / "report.json", timeout=1400)
    assert {line["point"]: line["problems"] for line in found} == {drill.name: [] for drill in DRILLS}


@pytest.mark.slow
@pytest.mark.deadline(900)
def test_with_vllm(tmp_path):
    found = report(tmp_path / "report.json", "--vllm", timeout=800)
    assert [line["problems"] for line in found] == [[]] * len(VLLM_DRILLS)


def test_differences_are_found_in_every_kind_of_value():
    import torch

    mine = {"a": [torch.ones(2), 1.5], "b": {"c": None}}
    assert differences(mine, {"a": [torch.ones(2), 1.5], "b": {"c": None}}) == []
    assert differences(mine, {"a": [torch.tensor([1.0, 1.0 + 1e-7]), 1.5], "b": {"c": 0}}) == [
        "/a/0",
        "/b/c: None instead of 0",
    ]
    assert differences(mine, {"a": [torch.ones(2)], "b": {"c": None}}) == ["/a: 2 instead of 1"]
