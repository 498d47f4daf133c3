"""Tests that need a CUDA device: skipped with the reason where there is none."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed import WorkerPool
from tests.gpu.machine import NODES
from tests.tiny_models import save_tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder `gpu`, and skip it without a device; those that want to be alone come last."""
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False"))


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Several tests at a time share the GPUs (`-n 6`), but those marked `alone`, which measure memory, have them to
    themselves: they wait for the others, and while they wait no other begins.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of all processes of this run
    kind = fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH
    with (root / "next").open("w") as door, (root / "gpus").open("w") as gpus:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(gpus, kind)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Dense, with tied embeddings, and a mixture of experts."""
    families = {"dense": "qwen3", "tied": "qwen2_tied", "moe": "qwen3_moe"}
    return {name: save_tiny_model(tmp_path_factory.mktemp(name), family) for name, family in families.items()}


@pytest.fixture(scope="session")
def gpu_pool() -> Iterator[WorkerPool]:
    """Warm processes for CUDA, apart from those of CPU runs, in which Megatron stays adapted to the CPU."""
    from tests.policing import keep_process

    pool = WorkerPool(max(torch.cuda.device_count(), 1) * NODES, on_start=keep_process, nodes=NODES)
    yield pool
    pool.close()


@pytest.fixture
def fresh_pool() -> Iterator[WorkerPool]:
    """Processes of the test's own: vLLM inside them leaves its patches there, and any run its memory."""
    from tests.policing import keep_process

    pool = WorkerPool(torch.cuda.device_count() * NODES, on_start=keep_process, nodes=NODES)
    yield pool
    pool.close()
