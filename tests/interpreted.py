"""Triton's kernels on a CPU."""

import os
import subprocess
import sys

from tests.command_line import ROOT
from tests.distributed import CHILD_PATH

DEADLINE_S = 100.0


def run_interpreted(module: str, function: str) -> None:
    """Call a function of a test module where Triton interprets kernels, which it decides where they are defined."""
    done = subprocess.run(
        [sys.executable, "-c", f"from {module} import {function}; {function}()"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": CHILD_PATH, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
