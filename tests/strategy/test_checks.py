"""What is refused or said for the GPUs of a run, on machines that are made up."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_megatron_rl.devices.facts import DeviceFacts
from lightning_megatron_rl.strategy import checks

OLD = DeviceFacts("2.11.0+cu130", torch_cuda=(13, 0), driver=(535, 104, 5))


def trainer_on(device: str) -> Any:
    """As much of a Trainer as is asked about its settings."""
    return SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device(device)),
        accumulate_grad_batches=1,
        checkpoint_callbacks=[],
        lightning_module=SimpleNamespace(automatic_optimization=True),
    )


def test_gpus_under_a_driver_that_is_too_old_are_refused(monkeypatch):
    monkeypatch.setattr(checks, "measure_devices", lambda *, imports: OLD)
    monkeypatch.setattr(checks, "count_gpus", lambda: 0)
    checks.check_trainer(trainer_on("cpu"))
    with pytest.raises(RuntimeError, match=r"the NVIDIA driver 535\.104\.5 is too old for torch"):
        checks.check_trainer(trainer_on("cuda:0"))
    monkeypatch.setattr(checks, "count_gpus", lambda: 1)  # CUDA's forward compatibility
    checks.check_trainer(trainer_on("cuda:0"))
