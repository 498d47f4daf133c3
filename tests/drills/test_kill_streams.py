"""Kill drills of runs that stream, in their short form: no prompt is lost, and none is used twice."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import ROOT
from tests.distributed import CHILD_PATH
from tests.drills.kill_streams import count_prompts
from tests.drills.stream_points import DRILLS, PLACEMENTS, SHORT


def report(out: Path, *options: str, timeout: float) -> list[dict[str, Any]]:
    """What the drills have found."""
    command = [sys.executable, "-m", "tests.drills.kill_streams", *options, "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": CHILD_PATH, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert out.is_file(), ended.stdout[-2000:] + ended.stderr[-3000:]
    return json.loads(out.read_text())["drills"]


@pytest.mark.slow  # test_kill.py kills runs, and modules/test_streaming.py resumes streams
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_killed_stream_loses_no_prompt_and_repeats_none(tmp_path, placement):
    found = report(tmp_path / "report.json", "--short", "--placements", placement, timeout=380)
    assert [line["problems"] for line in found] == [[]] * sum(len(each) for each in SHORT[placement])


@pytest.mark.slow
@pytest.mark.deadline(3000)
def test_every_point(tmp_path):
    found = report(tmp_path / "report.json", timeout=2900)
    assert len(found) == len(PLACEMENTS) * sum(map(len, DRILLS)) >= 40
    assert [(line["point"], line["problems"]) for line in found if line["problems"]] == []


def write_history(directory: Path, *lines: dict[str, Any]) -> None:
    (directory / "seen-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


BROUGHT = [{"step": 0, "rows": [*range(8)]}, {"step": 1, "rows": []}]


def trained(*steps: list[int], age: int = 1) -> list[dict[str, Any]]:
    return [{"step": step, "used": used, "age": age} for step, used in enumerate(steps)]


def test_a_step_that_is_done_again_replaces_its_first_form(tmp_path):
    first = trained([0, 1, 2, 3], [4, 5, 6, 7])
    again = trained([0, 1, 2, 3], [7, 6, 5, 4])[1:]
    write_history(tmp_path, *BROUGHT, *first, BROUGHT[1], *again)
    assert count_prompts(tmp_path, batches=2, epochs=1, max_staleness=1) == []


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (trained([0, 1, 2, 3], [3, 5, 6, 7]), ["epoch 0: rows [4] were lost", "epoch 0: rows [3] were used again"]),
        (trained([0, 1, 2, 3]), ["trained steps are [0], there should be 2", "epoch 0: rows [4, 5, 6, 7] were lost"]),
        (
            [*trained([0, 1, 2, 3], [4, 5, 6, 7]), {"step": 1, "rows": [8]}],
            ["step 1 was done again with other prompts"],
        ),
        (trained([0, 1, 2, 3], [4, 5, 6, 7], age=3), ["responses were 3 versions old at a bound of 1"]),
    ],
)
def test_what_was_lost_or_repeated_is_found(tmp_path, lines, problem):
    write_history(tmp_path, *BROUGHT, *lines)
    assert count_prompts(tmp_path, batches=2, epochs=1, max_staleness=1) == problem
