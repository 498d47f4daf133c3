"""What a test needs of the machine."""

import os

import pytest
import torch

# nodes that the processes of a job fall into, each with all GPUs of this machine (see `WorkerPool`)
NODES = int(os.environ.get("GPU_TEST_NODES", "1"))


def gpus(count: int) -> None:
    """Skip the test on a smaller machine."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, this machine has {torch.cuda.device_count()}")


def processes(count: int) -> None:
    """Skip the test where as many processes, each of which takes a GPU of its node, do not fit."""
    if (present := torch.cuda.device_count() * NODES) < count:
        pytest.skip(f"needs {count} GPUs (or GPU_TEST_NODES), this machine has {present} in {NODES} node(s)")
