"""The harness itself: results by rank, remote tracebacks, deadlines, and a clean start for each job."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import psutil
import pytest
import torch
import torch.distributed as dist

from lightning_megatron_rl.verify.pool import trainer_size
from tests.distributed import WorkerError, WorkerPool


def sum_of_ranks(offset: int) -> tuple[int, int, int]:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return os.getpid(), dist.get_world_size(), int(total)


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the remote message")
    dist.barrier()


def hang_on_rank_one() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    if dist.get_rank() == 1:
        time.sleep(1000)


def die() -> None:
    os._exit(7)


def environment_and_group() -> tuple[str | None, bool, str]:
    return os.environ.get("LEFT_BEHIND"), dist.is_initialized(), os.environ["RANK"]


def parent() -> int:
    return os.getppid()


def what_is_there() -> tuple[str | None, str | None, bool, str]:
    variables = os.environ.get("OF_THE_FIRST"), os.environ.get("OF_THE_SECOND")
    return *variables, "megatron.core" in sys.modules, os.getcwd()


def import_nothing() -> None:
    """What the test asks of its workers needs no library."""


NODE = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NCCL_HOSTID")


def place() -> tuple[list[str | None], tuple[int, int]]:
    return [os.environ.get(name) for name in NODE], trainer_size(int(os.environ["WORLD_SIZE"]))


def test_pool_reuses_its_processes_and_orders_results(worker_pool: WorkerPool):
    first = worker_pool.run(sum_of_ranks, 10, world_size=2)
    second = worker_pool.run(sum_of_ranks, offset=0, world_size=2)
    assert [result[1:] for result in first] == [(2, 21)] * 2
    assert [result[1:] for result in second] == [(2, 1)] * 2
    assert [result[0] for result in first] == [result[0] for result in second]


def test_remote_traceback_is_raised_and_the_pool_survives(worker_pool: WorkerPool):
    with pytest.raises(WorkerError, match="the remote message"):
        worker_pool.run(fail_on_rank_one, world_size=2)
    assert worker_pool.run(sum_of_ranks, 0, world_size=2)[0][2] == 1


def test_failure_of_a_partial_is_told_as_any_other(worker_pool: WorkerPool):
    with pytest.raises(WorkerError, match=r"partial[\s\S]* failed"):
        worker_pool.run(partial(divmod, 1, 0), world_size=1)


def test_deadline_names_the_line_and_the_pool_recovers(worker_pool: WorkerPool):
    worker_pool.run(sum_of_ranks, 0, world_size=2)  # warm: the short deadline below is not for imports
    with pytest.raises(WorkerError, match=r"rank 1 of 2: still running[\s\S]*hang_on_rank_one"):
        worker_pool.run(hang_on_rank_one, world_size=2, timeout=3.0)
    answers = worker_pool.run(environment_and_group, world_size=2, init_process_group=False)
    assert answers == [(None, False, "0"), (None, False, "1")]


def test_dead_worker_is_reported_with_its_exit_code(worker_pool: WorkerPool):
    with pytest.raises(WorkerError, match="exited with code 7"):
        worker_pool.run(die, world_size=1)
    assert worker_pool.run(sum_of_ranks, 3, world_size=1)[0][2] == 3


@pytest.mark.deadline(60)
def test_a_pool_is_closed_while_a_process_that_was_forked_here_lives():
    """Fails, by its deadline, if the pool waits until the other end of its connection is gone: the child has it."""
    pool = WorkerPool(1, prepare=import_nothing)
    pool.run(parent, world_size=1, init_process_group=False)
    pid = os.fork()
    if pid == 0:
        time.sleep(1000)
        os._exit(0)
    try:
        pool.close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_a_worker_cannot_import_is_told(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    monkeypatch.syspath_prepend(tmp_path)
    with closing(WorkerPool(1)) as pool, pytest.raises(RuntimeError, match=r"exited with code 1\n[\s\S]*no torch here"):
        pool.run(place, world_size=1)


def test_too_many_ranks_are_refused(worker_pool: WorkerPool):
    with pytest.raises(ValueError, match="world_size 99"):
        worker_pool.run(sum_of_ranks, 0, world_size=99)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[WorkerPool]:
    from tests.policing import keep_process

    pool = WorkerPool(4, on_start=keep_process, nodes=2)
    yield pool
    pool.close()


def test_a_worker_starts_with_imports_and_todays_environment(two_nodes: WorkerPool, tmp_path, monkeypatch):
    before = os.getcwd()
    monkeypatch.setenv("OF_THE_FIRST", "1")
    two_nodes.run(place, world_size=1, init_process_group=False)
    monkeypatch.delenv("OF_THE_FIRST")
    monkeypatch.setenv("OF_THE_SECOND", "2")
    monkeypatch.chdir(tmp_path)
    first, second = two_nodes.run(what_is_there, world_size=2, init_process_group=False)
    has_imports = not torch.cuda.is_available()  # what has touched a GPU cannot be forked
    assert first == ("1", None, has_imports, before)
    assert second == (None, "2", has_imports, str(tmp_path))


def test_ranks_fall_into_nodes(two_nodes: WorkerPool):
    assert two_nodes.run(place, world_size=4, init_process_group=False) == [
        (["0", "2", "0", "node0"], (2, 2)),
        (["1", "2", "0", "node0"], (2, 2)),
        (["0", "2", "1", "node1"], (2, 2)),
        (["1", "2", "1", "node1"], (2, 2)),
    ]
    assert two_nodes.run(place, world_size=1, init_process_group=False) == [(["0", "1", "0", "node0"], (1, 1))]


def test_ranks_of_one_node_have_no_host_of_their_own(worker_pool: WorkerPool):
    assert worker_pool.run(place, world_size=2, init_process_group=False)[1] == (["1", "2", "0", None], (2, 1))


def test_ranks_that_do_not_fill_nodes_are_refused(two_nodes: WorkerPool):
    with pytest.raises(ValueError, match="world_size 3 does not divide into nodes of 2"):
        two_nodes.run(place, world_size=3)
    with pytest.raises(ValueError, match="size=4 processes do not divide into nodes=3"):
        WorkerPool(4, nodes=3)


def test_a_pool_outlives_the_process_that_forks_its_workers(two_nodes: WorkerPool):
    (first,) = two_nodes.run(parent, world_size=1, init_process_group=False)
    os.kill(first, signal.SIGKILL)
    while psutil.Process(first).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    (second,) = two_nodes.run(parent, world_size=1, init_process_group=False)
    assert second not in (first, os.getpid())
    assert two_nodes.run(sum_of_ranks, 3, world_size=2)[0][2] == 7
