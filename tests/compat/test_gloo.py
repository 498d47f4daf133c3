"""Gloo groups that share their device: the same sums, a thread per group and not three."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_megatron_rl.compat.gloo import install_shared_gloo
from tests.distributed import WorkerError

GROUPS = 10


def threads_of_groups(world_size: int) -> tuple[int, list[float]]:
    """Return how many threads ten more groups have cost, and their sums, some at once."""
    install_shared_gloo(torch.device("cpu"))
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    before = len(os.listdir("/proc/self/task"))
    groups = [dist.new_group(list(range(world_size))) for _ in range(GROUPS)]
    values = [torch.full((1000,), float(number)) for number in range(GROUPS)]
    works = [dist.all_reduce(value, group=group, async_op=True) for value, group in zip(values, groups, strict=True)]
    for work in reversed(works):
        work.wait()
    gained = len(os.listdir("/proc/self/task")) - before
    dist.destroy_process_group()
    return gained, [float(value.mean()) for value in values]


def test_groups_share_a_device(worker_pool):
    """torch's own would have taken thirty threads."""
    for gained, sums in worker_pool.run(threads_of_groups, 2, world_size=2, init_process_group=False):
        assert gained == GROUPS
        assert sums == [2.0 * number for number in range(GROUPS)]


def wait_for_nobody(rank: int) -> None:
    install_shared_gloo(torch.device("cpu"))
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    if dist.get_rank() == rank:
        return
    dist.all_reduce(torch.ones(1))


def test_deadline_still_holds(worker_pool):
    with pytest.raises(WorkerError, match=r"(?i)timed? ?out|connection (closed|reset)"):
        worker_pool.run(wait_for_nobody, 1, world_size=2, init_process_group=False)
