import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lightning_megatron_rl.rewards import limited_child
from lightning_megatron_rl.rewards.math_verifier import MathVerifier
from tests.notices import silent, told

ENDLESS = r"$\binom{100000000}{50000000}$"  # math-verify's own timeout does not end this one
VAST = "$(x+y+z+1)^{2000}$"  # expanded: 1 GB after 5 s of CPU time, and far from its end


@pytest.fixture(scope="module")
def verifier():
    verifier = MathVerifier(cpu_seconds=1.0)
    verifier.equal("1", "1")  # starts the child, which outlives single tests
    yield verifier
    verifier.close()


def test_same_child_for_all_comparisons(verifier: MathVerifier):
    assert verifier.equal("72", "it is 72")
    child = verifier._child
    assert not verifier.equal("72", "it is\n73")
    assert verifier._child is child


def test_endless_evaluation_is_wrong_and_the_next_one_right(verifier: MathVerifier):
    with told(r"'72'.*binom.* took more than 1.0 s of CPU time: counted as wrong"):
        assert not verifier.equal("72", ENDLESS)
    with silent():
        assert verifier.equal("72", "72.0")


def test_memory_is_limited():
    verifier = MathVerifier(cpu_seconds=20.0, memory_bytes=192 * 2**20)
    try:
        with silent():  # neither out of time nor dead: the allocation failed
            assert not verifier.equal("72", VAST)
    finally:
        verifier.close()


def test_works_outside_the_main_thread(verifier: MathVerifier):
    results = []
    thread = threading.Thread(target=lambda: results.append(verifier.equal("1/2", "0.5")))
    thread.start()
    thread.join(timeout=120)
    assert results == [True]


def test_killed_child_is_replaced(verifier: MathVerifier):
    assert verifier.equal("1", "1")
    os.kill(verifier._child.process.pid, signal.SIGKILL)
    verifier._child.process.wait(timeout=10)
    assert verifier.equal("1", "1.0")  # noticed before the comparison: nothing is lost


def test_silent_child_is_given_up(verifier: MathVerifier, monkeypatch: pytest.MonkeyPatch):
    assert verifier.equal("1", "1")
    monkeypatch.setattr(limited_child, "ANSWER_SECONDS", 0.5)
    os.kill(verifier._child.process.pid, signal.SIGSTOP)
    with told("ended with code -9: counted as wrong"):
        assert not verifier.equal("1", "1")


def test_child_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no math-verify here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"math_worker did not start and ended with code 1"):
        MathVerifier().equal("1", "1")


def test_what_libraries_print_is_no_reply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("print('true')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    verifier = MathVerifier()
    assert [verifier.equal("1", response) for response in ("2", "1", "3")] == [False, True, False]
    verifier.close()


def test_child_ends_with_its_parent():
    code = (
        "import os; from lightning_megatron_rl.rewards.math_verifier import MathVerifier\n"
        "v = MathVerifier(); v.equal('1', '1'); print(v._child.process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120, env=env)
    pid, deadline = int(done.stdout), time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().rsplit(")", 1)[1].split()[0] == "Z":  # ended, not yet collected by whoever adopted it
                return
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{pid}")
