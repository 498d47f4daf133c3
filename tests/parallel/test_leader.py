"""A rank ends soon after the one that started it, whatever it does; and does not, once its run has ended."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from lightning_megatron_rl.parallel import leader
from tests.distributed import CHILD_PATH

# starts a rank as the launcher does, says which, and is gone without a word, as one that was killed
STARTER = """
import os, subprocess, sys

import pytest
os.environ["LIGHTNING_MEGATRON_RL_LEADER"] = str(os.getpid())
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.DEVNULL)
print(rank.pid, flush=True)
sys.stdin.read()
os._exit(3)
"""


def seconds_until_gone(rank_code: str, longest: float) -> tuple[float, str]:
    """Return how long a rank outlives the one that started it, and what it says."""
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, rank_code],
        env={**os.environ, "LOCAL_RANK": "1", "PYTHONPATH": CHILD_PATH},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert starter.stdin is not None
    assert starter.stdout is not None
    assert starter.stderr is not None
    rank = psutil.Process(int(starter.stdout.readline()))
    time.sleep(2.0)  # into its sleep
    starter.stdin.close()
    starter.wait()
    gone = time.monotonic()
    try:
        while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE and time.monotonic() < gone + longest:
            time.sleep(0.1)
        seconds = time.monotonic() - gone
    finally:
        if rank.is_running():
            rank.kill()
    said = starter.stderr.read()
    starter.stdout.close()
    starter.stderr.close()
    return seconds, said


def test_rank_ends_within_seconds_and_says_why():
    """It waits in native code that releases Python's lock, as collectives do."""
    seconds, said = seconds_until_gone("import lightning_megatron_rl, time; time.sleep(100)", 40.0)
    assert seconds < leader.GRACE_S + 10.0  # a busy machine
    assert "local rank 1 (process " in said
    assert "which started it, is gone" in said


@pytest.mark.slow
def test_rank_whose_run_has_ended_may_go_on():
    code = "import time; from lightning_megatron_rl.parallel.leader import rest; rest(); time.sleep(100)"
    seconds, said = seconds_until_gone(code, leader.GRACE_S + 3.0)
    assert seconds >= leader.GRACE_S + 3.0
    assert said == ""


@pytest.mark.slow
def test_what_a_rank_starts_is_no_rank():
    """A sampler's process, which has another parent, must not end for that."""
    grandchild = "import os, sys, time; from lightning_megatron_rl.parallel.leader import LEADER, GRACE_S;"
    grandchild += "time.sleep(GRACE_S + 2); sys.stderr.write('lives on ' + str(LEADER in os.environ))"
    code = "import lightning_megatron_rl, subprocess, sys;"
    code += f"subprocess.run([sys.executable, '-c', {grandchild!r}])"
    starter = STARTER.replace("sys.stdin.read()", "rank.wait()").replace("_exit(3)", "_exit(0)")
    started = subprocess.run(
        [sys.executable, "-c", starter, code],
        env={**os.environ, "PYTHONPATH": CHILD_PATH},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "lives on False" in started.stderr


def test_process_that_no_rank_started_watches_nobody(monkeypatch):
    monkeypatch.delenv(leader.LEADER, raising=False)
    leader.watch()
    assert leader._thread is None
