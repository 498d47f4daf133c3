"""The queue of saves: in order, one at a time, and nothing after a failure."""

import threading

import pytest

from lightning_megatron_rl.checkpoints.save_queue import SaveQueue


def test_jobs_run_in_order_beside_the_caller():
    queue, done, gate = SaveQueue(), [], threading.Event()
    assert queue.is_empty
    queue.submit(lambda: (gate.wait(30.0), done.append(1))[1])
    queue.submit(lambda: done.append(2))
    assert not queue.is_empty
    assert done == []
    gate.set()
    queue.wait()
    assert done == [1, 2]
    assert queue.is_empty
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def test_nothing_runs_after_a_failure_until_it_was_told():
    """What would have followed is mostly the removal of the checkpoint before."""
    queue, done = SaveQueue(), []

    def fail() -> None:
        raise OSError("full")

    queue.submit(fail)
    queue.submit(lambda: done.append("removed"))
    with pytest.raises(OSError, match="full"):
        queue.wait()
    assert done == []
    queue.wait()
    queue.submit(lambda: done.append("next"))
    queue.wait()
    assert done == ["next"]


def test_what_is_not_run_is_tidied_up():
    queue, done = SaveQueue(), list[str]()

    def fail() -> None:
        raise OSError("no room")

    queue.submit(fail, instead=lambda: done.append("of the first"))
    queue.submit(lambda: done.append("second"), instead=lambda: done.append("of the second"))
    with pytest.raises(OSError, match="no room"):
        queue.wait()
    assert done == ["of the second"]
