"""What is refused or said for the GPUs of a run, on machines that are made up."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_megatron_rl.devices.facts import DeviceFacts
from lightning_megatron_rl.strategy import checks

OLD = DeviceFacts("2.11.0+cu130", torch_cuda=(13, 0), driver=(535, 104, 5))


def trainer_on(device: str) -> Any:
    """As much of a Trainer as is asked about its settings."""
    return SimpleNamespace(
        strategy=SimpleNamespace(
            root_device=torch.device(device), precision_plugin=SimpleNamespace(precision="bf16-mixed")
        ),
        gradient_clip_val=None,
        gradient_clip_algorithm=None,
        log_every_n_steps=50,
        val_check_interval=1.0,
        check_val_every_n_epoch=1,
        num_sanity_val_steps=2,
        accumulate_grad_batches=1,
        checkpoint_callbacks=[],
        lightning_module=SimpleNamespace(automatic_optimization=True),
        callbacks=[],
    )


def test_gpus_that_cuda_cannot_use_are_refused_with_the_reason(monkeypatch):
    for other in ("check_callbacks", "check_checkpoint_places", "check_module"):  # which look at more of a Trainer
        monkeypatch.setattr(checks, other, lambda found: None)
    monkeypatch.setattr(checks, "measure_devices", lambda *, imports: OLD)
    monkeypatch.setattr(checks, "count_gpus", lambda: 0)
    checks.check_trainer(trainer_on("cpu"))
    with pytest.raises(RuntimeError, match=r"the NVIDIA driver 535\.104\.5 is too old for torch"):
        checks.check_trainer(trainer_on("cuda:0"))
    monkeypatch.setattr(checks, "measure_devices", lambda *, imports: replace(OLD, driver=(580, 95)))
    with pytest.raises(RuntimeError, match=r"no CUDA device, and the driver is 580\.95\. See what nvidia-smi"):
        checks.check_trainer(trainer_on("cuda:0"))
    monkeypatch.setattr(checks, "count_gpus", lambda: 1)  # CUDA's forward compatibility
    checks.check_trainer(trainer_on("cuda:0"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gradient_clip_val", -1.0, r"gradient_clip_val=-1\.0 must be at least 0: leave it out for no clipping"),
        ("gradient_clip_val", float("nan"), "gradient_clip_val=nan must be a finite number"),
        ("val_check_interval", 0, "val_check_interval=0 must be above 0"),
        ("check_val_every_n_epoch", 0, "check_val_every_n_epoch=0 must be at least 1"),
        ("num_sanity_val_steps", -3, "num_sanity_val_steps=-3 must be at least -1"),
    ],
)
def test_numbers_that_lightning_takes_and_that_mean_nothing_are_refused(name, value, message):
    trainer = trainer_on("cpu")
    checks.check_trainer_numbers(trainer)
    setattr(trainer, name, value)
    with pytest.raises(ValueError, match=message):
        checks.check_trainer_numbers(trainer)


@pytest.mark.parametrize("interval", [timedelta(minutes=5), "00:00:05:00", {"minutes": 5}])
def test_a_time_between_validations_is_refused(interval):
    trainer = Trainer(val_check_interval=interval, accelerator="cpu", logger=False, enable_progress_bar=False)
    with pytest.raises(ValueError, match="val_check_interval is a time: each rank would look at a clock of its own"):
        checks.check_trainer_numbers(trainer)


def test_fp32_on_a_gpu_is_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checks.warn_of_fp32(torch.device("cpu"), "32-true")
        checks.warn_of_fp32(torch.device("cuda", 0), "bf16-mixed")
    with pytest.warns(UserWarning, match=r"precision='32-true' on a GPU: .*Set Trainer\(precision='bf16-mixed'\)"):
        checks.warn_of_fp32(torch.device("cuda", 0), "32-true")


def slow_links(devices: Sequence[int]) -> DeviceFacts:
    """Links over PCIe between the first of these devices and the others."""
    return DeviceFacts("2.11.0", links={(devices[0], other): "PHB" for other in devices[1:]})


def test_slow_links_between_the_gpus_of_the_run_are_warned_about(monkeypatch):
    monkeypatch.setattr(checks, "measure_links", slow_links)
    with pytest.warns(UserWarning, match=r"no NVLink between GPUs 2-3 \(PHB\)"):
        checks.warn_of_slow_links([torch.device("cuda", 2), torch.device("cuda", 3)], local_rank=0)


@pytest.mark.parametrize(
    ("devices", "local_rank"),
    [(["cuda:2", "cuda:3"], 1), (["cuda:2"], 0), (["cpu", "cpu"], 0)],
    ids=["another process", "one GPU", "CPU"],
)
def test_links_are_looked_at_once_and_where_there_are_some(monkeypatch, devices, local_rank):
    asked: list[Sequence[int]] = []
    monkeypatch.setattr(checks, "measure_links", asked.append)
    checks.warn_of_slow_links([torch.device(name) for name in devices], local_rank)
    assert asked == []


@pytest.mark.parametrize(("returned", "computed"), [(torch.nan, torch.nan), (0.0, 0.0), (1.0, None), (2.0, 2.000001)])
def test_loss_of_the_update_may_be_returned(returned: float, computed: float | None):
    checks.refuse_other_loss(torch.tensor(returned), None if computed is None else torch.tensor(computed))


@pytest.mark.parametrize(("returned", "computed"), [(0.0, 1e-9), (torch.nan, 1.0), (1.0, torch.nan), (-1.0, 1.0)])
def test_another_loss_is_refused(returned: float, computed: float):
    message = f"loss of {returned:g}, the update's is {computed:g}:.*loss per token.*on_before_optimizer_step"
    with pytest.raises(ValueError, match=message):
        checks.refuse_other_loss(torch.tensor(returned), torch.tensor(computed))


class HomeLogger(DummyLogger):
    """Logs into the home directory, as it says."""

    save_dir = "~/runs"


def test_checkpoints_beside_a_logger_in_the_home_directory_are_refused():
    """Lightning joins names to what the logger was given, and nobody expands it then."""
    trainer = Trainer(accelerator="cpu", logger=HomeLogger(), callbacks=[ModelCheckpoint()])
    with pytest.raises(
        ValueError, match=r"HomeLogger\(save_dir\) of .* without dirpath='~/runs': .* the whole path, /"
    ):
        checks.check_checkpoint_places(trainer)
    checks.check_checkpoint_places(Trainer(accelerator="cpu", logger=HomeLogger(), callbacks=[ModelCheckpoint("a")]))
