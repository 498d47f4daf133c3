import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from lightning_megatron_rl.rollout.vllm.process import (
    EngineCallError,
    EngineDiedError,
    EngineTimeoutError,
    WorkerProcess,
    child_environment,
)
from tests.rollout.conftest import is_running

ROOT = str(Path(__file__).resolve().parents[2])


@pytest.fixture
def worker():
    worker = WorkerProcess("tests.rollout.echo_worker", child_environment(dict(os.environ), {"PYTHONPATH": ROOT}))
    worker.request("echo", ("echo", "started"), 60)
    yield worker
    worker.kill()


def test_answers_come_back(worker):
    assert worker.request("echo", ("echo", [1, "two"]), 60) == [1, "two"]
    assert os.getsid(worker.pid) == worker.pid != os.getsid(0)


def test_news_come_with_an_answer():
    heard = []
    environment = child_environment(dict(os.environ), {"PYTHONPATH": ROOT})
    worker = WorkerProcess("tests.rollout.echo_worker", environment, hear=heard.append)
    try:
        assert worker.request("echo", ("news", [3, 4]), 60) is None
        assert worker.request("echo", ("echo", 5), 60) == 5
    finally:
        worker.kill()
    assert heard == [[3, 4]]


@pytest.mark.parametrize("end", ["kill", "close", "deadline"])
def test_named_shared_memory_goes_with_the_process(worker, end):
    """Killed together with Python's resource tracker, its owner cannot remove it."""
    path = Path("/dev/shm") / worker.request("share", ("share", 4096), 60)
    assert path.exists()
    if end == "deadline":
        with pytest.raises(EngineTimeoutError):
            worker.request("generate", ("sleep", 100), 0.3)
    else:
        getattr(worker, end)()
    assert not path.exists()


def test_an_answer_that_is_there_is_in_time(worker):
    """A trainer may take longer to build its model than its engine may take to start."""
    for number in range(5):
        worker.send("start", ("echo", number), 60)
        assert worker._connection.poll(60)
        assert worker.receive("start", -5.0) == number
        time.sleep(0.05)  # in which it would be killed
        assert worker.request("echo", ("echo", 1), 60) == 1


def test_exit_is_named_with_code_and_output(worker):
    with pytest.raises(
        EngineDiedError, match=rf"(?s)process {worker.pid} exited with code 3 during boom.*about to end"
    ):
        worker.request("boom", ("exit", 3), 60)
    assert worker.is_gone


def test_kill_minus_9_is_named_within_a_second(worker):
    threading.Timer(0.3, os.kill, (worker.pid, signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(EngineDiedError, match=rf"process {worker.pid} was killed by SIGKILL .* during generate"):
        worker.request("generate", ("sleep", 100), 60)
    assert time.monotonic() - start < 3  # a hundredth of a second on an idle machine


def test_death_between_calls_is_seen_by_the_next(worker):
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match="SIGKILL"):
        worker.request("echo", ("echo", 1), 60)


def test_process_that_nobody_holds_any_more_ends():
    """What watches its deadlines does not keep it."""
    environment = child_environment(dict(os.environ), {"PYTHONPATH": ROOT})
    dropped = WorkerProcess("tests.rollout.echo_worker", environment)
    pid = dropped.request("echo", ("echo", dropped.pid), 60)
    del dropped
    gc.collect()
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_deadline_names_phase_and_seconds_and_kills(worker):
    with pytest.raises(EngineTimeoutError, match=r"generate did not end within 0\.3 seconds .* raise the deadline"):
        worker.request("generate", ("sleep", 100), 0.3)
    assert not is_running(worker.pid)


def test_deadline_holds_for_sending_to_a_process_that_does_not_read(worker):
    """A stopped process reads nothing, so that a message larger than the socket's buffer blocks the sender."""
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(EngineTimeoutError, match="generate did not end"):
        worker.request("generate", ("echo", bytes(50_000_000)), 0.5)
    assert not is_running(worker.pid)


def test_error_of_the_call_is_passed_on_and_ends_the_process(worker):
    with pytest.raises(EngineCallError, match=r"update failed .*\n.*ValueError: no such layer"):
        worker.request("update", ("fail", "no such layer"), 60)
    assert not is_running(worker.pid)


def test_interrupt_ends_the_process_so_that_no_late_answer_is_taken_for_the_next(worker):
    threading.Timer(1.0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        worker.request("generate", ("sleep", 100), 60)
    assert time.monotonic() - start < 30  # not at the deadline of 60
    assert worker.is_gone
    assert not is_running(worker.pid)


def test_close_ends_it_at_once(worker):
    start = time.monotonic()
    worker.close()
    assert not is_running(worker.pid)
    assert time.monotonic() - start < 4  # before the grace of 5 seconds is over: it took the end of file


def test_close_takes_the_whole_group_along(worker):
    grandchild = worker.request("spawn", ("spawn", None), 60)
    worker.close()
    assert not is_running(worker.pid)
    deadline = time.monotonic() + 5
    while is_running(grandchild):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_close_kills_what_ignores_sigterm(worker):
    worker.request("ignore", ("ignore_sigterm", 100), 60)
    worker.close(grace_s=0.2)
    assert not is_running(worker.pid)


def test_output_is_bounded_and_its_end_is_kept(worker):
    worker.request("print", ("print", "\n".join(f"line {i}" for i in range(5000)) + "\n" + "x" * 100_000), 60)
    worker.request("print", ("print", "the end"), 60)
    worker.close()
    tail = worker.tail()
    assert tail.endswith("| the end")
    assert len(tail) < 200_000
    assert "line 1\n" not in tail


def test_launchers_variables_do_not_reach_the_child():
    launched = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
        "LD_PRELOAD": "libx.so",
    }
    child = child_environment(launched | {"HOME": "/root", "PYTHONPATH": "/mine"}, {"OMP_NUM_THREADS": "3"})
    assert child == {
        "HOME": "/root",
        "PYTHONPATH": f"/mine:{ROOT}",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "3",
    }
