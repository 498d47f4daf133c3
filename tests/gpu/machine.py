"""What a test needs of the machine."""

import pytest
import torch


def gpus(count: int) -> None:
    """Skip the test on a smaller machine."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, this machine has {torch.cuda.device_count()}")
