"""Deadlines of calls: one thread for all of them."""

import threading
import time

from lightning_megatron_rl.rollout.vllm.watchdog import Watchdog


def waits(dog: Watchdog, timeout_s: float, work_s: float) -> bool:
    """Guard work of a length; return whether it took too long."""
    dog.arm(timeout_s)
    time.sleep(work_s)
    return dog.disarm()


def test_expires_once_for_each_call_that_takes_too_long():
    expired: list[float] = []
    dog = Watchdog(lambda: expired.append(time.monotonic()))
    assert not waits(dog, 60, 0)
    began = time.monotonic()
    assert waits(dog, 0.1, 1.0)  # shorter than the one before, whose end the thread still waits for
    assert 0.1 <= expired[0] - began < 1.0
    assert not waits(dog, 0.3, 0)
    assert not waits(dog, 60, 0.6), "the deadline of the call before is not this one's"
    assert waits(dog, 0, 0.2)
    assert len(expired) == 2
    dog.close()


def test_all_calls_have_one_thread_that_ends():
    before = set(threading.enumerate())
    dog = Watchdog(lambda: None)
    (thread,) = set(threading.enumerate()) - before
    for _ in range(100):
        dog.arm(60)
        assert set(threading.enumerate()) - before == {thread}
        assert not dog.disarm()
    dog.close()
    thread.join(5)
    assert not thread.is_alive()


def test_disarm_waits_for_what_is_just_expiring():
    """Else it might hit whatever comes next."""
    ended = threading.Event()

    def expire() -> None:
        time.sleep(0.3)
        ended.set()

    dog = Watchdog(expire)
    assert waits(dog, 0.05, 0.2)
    assert ended.is_set()
    dog.close()


def test_a_call_may_have_all_time():
    dog = Watchdog(lambda: None)
    assert not waits(dog, float("inf"), 0.05)
    assert not waits(dog, 1e12, 0.05)
    assert waits(dog, 0, 0.2), "the thread is still there"
    dog.close()


def test_an_expiry_that_fails_is_told_and_is_not_the_last(caplog):
    def fail() -> None:
        raise OSError("no such process")

    dog = Watchdog(fail)
    assert waits(dog, 0, 0.2)
    assert waits(dog, 0, 0.2)
    assert [str(record.exc_info[1]) for record in caplog.records] == ["no such process"] * 2
    dog.close()
