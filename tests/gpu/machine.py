"""What a test needs of the machine: marks, so that one that cannot run starts nothing and waits for nobody."""

import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch

# nodes that the processes of a job fall into, each with all GPUs of this machine (see `WorkerPool`)
NODES = int(os.environ.get("GPU_TEST_NODES", "1"))


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skip the test on a smaller machine."""
    present = torch.cuda.device_count()
    return pytest.mark.skipif(present < count, reason=f"needs {count} GPUs, this machine has {present}")


def needs_processes(count: int) -> pytest.MarkDecorator:
    """Skip the test where as many processes, each of which takes a GPU of its node, do not fit."""
    present = torch.cuda.device_count() * NODES
    reason = f"needs {count} GPUs (or GPU_TEST_NODES), this machine has {present} in {NODES} node(s)"
    return pytest.mark.skipif(present < count, reason=reason)


def by_processes(sizes: Iterable[tuple[str, int]]) -> list[Any]:
    """Parameters of a test, each with the number of processes that it needs."""
    return [pytest.param(name, marks=needs_processes(size)) for name, size in sizes]
