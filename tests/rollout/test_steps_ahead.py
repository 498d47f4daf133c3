"""vLLM begins a step ahead on a GPU; what was begun ends before new weights come."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_what_was_begun_ends_with_the_weights_it_was_begun_with(model_dir):
    """Of five steps the odd ones begin a token of each response and the even ones end it: `settle` ends the third."""
    command = [sys.executable, "-m", "tests.rollout.steps_ahead", str(model_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ahead"] == 1
    assert found["left"] == 0
    assert found["drawn"] == {name: [[0, 3], [1, 9]] for name in ("a", "b")}
