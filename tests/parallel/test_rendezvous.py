"""Processes of one machine meet where no other machine can reach them."""

import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import psutil
import pytest

from tests.distributed import ROOT
from tests.training import fit_sft


def listening(pid: int) -> set[str]:
    """Addresses on which a process listens for TCP connections."""
    connections = psutil.Process(pid).net_connections(kind="tcp")
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


class Listens(pl.Callback):
    """Notes where the process listens while it trains."""

    def __init__(self) -> None:
        self.addresses: set[str] = set()

    def on_train_batch_end(self, *_: object) -> None:
        self.addresses |= listening(os.getpid())


def addresses_of_run(model: Path, world_size: int) -> set[str]:
    callback = Listens()
    fit_sft(model, {}, world_size, steps=1, callbacks=[callback])
    return callback.addresses


ANY_ADDRESS = {"0.0.0.0", "::"}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("by_strategy", [True, False])
def test_no_rank_listens_on_all_interfaces(worker_pool, qwen3_dir, world_size, by_strategy):
    """Whoever makes the process group: the strategy, or the pool of `verify-layout`."""
    found = worker_pool.run(
        addresses_of_run, qwen3_dir, world_size, world_size=world_size, init_process_group=not by_strategy
    )
    for addresses in found:
        assert not addresses & ANY_ADDRESS
    if world_size == 1:
        assert found[0] <= {"127.0.0.1"}
    else:
        assert "127.0.0.1" in found[0], "rank 0 serves the store"


ENDS = """
import atexit, datetime, sys
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning_megatron_rl.parallel.rendezvous import join

atexit.register(lambda: print("group at the end:", dist.is_initialized()))
for _ in range(2):
    join(LightningEnvironment(), 1, torch.device("cpu"), datetime.timedelta(seconds=20))
assert dist.is_initialized()
"""


@pytest.mark.slow
def test_the_process_group_ends_before_the_interpreter():
    """Else threads of gloo free tensors in an interpreter that is gone, by which some runs end with SIGABRT."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "group at the end: False" in done.stdout
