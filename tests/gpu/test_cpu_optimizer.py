"""Megatron's optimizer on the host: the steps of the one on the device, and checkpoints of it that resume bitwise."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.distributed import WorkerError
from tests.training import Run, fit_arithmetic

pytestmark = pytest.mark.deadline(400)
TRAINER = {"accelerator": "cuda", "precision": "bf16-mixed"}
STEPS, STOP = 4, 2
# exports are bf16, whose neighbours differ by 2^-8: another Adam's rounding moves a few weights by one of them. Four
# steps move the weights by some percent
RELATIVE = 2e-3


class DeviceBytes(pl.Callback):
    """Bytes of main parameters and moments on the device and on the host, at the end."""

    def __init__(self) -> None:
        self.bytes = {"cuda": 0, "cpu": 0}

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        for optimizer in trainer.optimizers:
            for part in optimizer.parts():
                for state in part.optimizer.state.values():
                    for tensor in (value for value in state.values() if isinstance(value, torch.Tensor)):
                        self.bytes[tensor.device.type] += tensor.nbytes


def fit(model: Path, runs: list[dict[str, Any]], world_size: int = 1) -> list[Run]:
    """One run after the other; `share` of the optimizer is on the host."""
    found = []
    for options in runs:
        share, measure = options.pop("share"), DeviceBytes()
        offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": share} if share else {}
        config = {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True, **offload}
        run = fit_arithmetic(model, {}, world_size, optimizer=config, trainer=TRAINER, callbacks=[measure], **options)
        run.extra = measure.bytes
        found.append(Run(run.steps, {name: weight.cpu() for name, weight in run.weights.items()}, run.extra))
    return found


def relative(mine: Run, other: Run) -> float:
    """Largest relative difference of a weight matrix."""
    return max(
        float((mine.weights[name].float() - weight.float()).norm() / weight.float().norm())
        for name, weight in other.weights.items()
    )


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_steps_and_checkpoints_are_those_of_the_device(gpu_pool, qwen3_dir, tmp_path, share):
    """Fails without `make_moments` (Megatron then moves the weights by a random step) and `take_loaded_state`, and
    without `main_parameters` (the device's main parameters are halves, which the host would take for numbers)."""
    here, there = tmp_path / "device", tmp_path / "host"
    device, again, host, resumed, moved_out, moved_in = gpu_pool.run(
        fit,
        qwen3_dir,
        [
            {"share": 0.0, "max_steps": STEPS, "checkpoints": here, "every_n_steps": STOP},
            {"share": 0.0, "max_steps": STEPS, "ckpt_path": str(here / f"step={STOP}.ckpt")},
            {"share": share, "max_steps": STEPS, "checkpoints": there, "every_n_steps": STOP},
            {"share": share, "max_steps": STEPS, "ckpt_path": str(there / f"step={STOP}.ckpt")},
            {"share": 0.0, "max_steps": STEPS, "ckpt_path": str(there / f"step={STOP}.ckpt")},
            {"share": share, "max_steps": STEPS, "ckpt_path": str(here / f"step={STOP}.ckpt")},
        ],
        world_size=1,
        init_process_group=False,
        timeout=380,
    )[0]
    assert device.extra["cpu"] == 0
    assert all(torch.equal(again.weights[name], weight) for name, weight in device.weights.items())
    assert host.extra["cpu"] > 0
    assert (host.extra["cuda"] == 0) == (share == 1.0)
    assert relative(host, device) < RELATIVE
    assert resumed.steps[0]["policy/loss"] == host.steps[STOP]["policy/loss"], "the weights were moved by loading"
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in host.weights.items())
    assert relative(moved_out, host) < RELATIVE
    assert relative(moved_in, host) < RELATIVE


def step_with_and_without_halves() -> tuple[torch.Tensor, torch.Tensor]:
    """Main parameters after three steps of Transformer Engine's Adam that keeps halves of them, and of one that does
    not."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    from lightning_megatron_rl.checkpoints.main_parameters import join

    found = []
    for halves in (True, False):
        generator = torch.Generator("cuda").manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(4096, device="cuda", generator=generator).bfloat16())
        optimizer = FusedAdam(
            [parameter], lr=1e-2, master_weights=True, use_decoupled_grad=True, store_param_remainders=halves
        )
        for _ in range(3):
            parameter.decoupled_grad = torch.randn(4096, device="cuda", generator=generator)
            optimizer.step()
        main = optimizer.state[parameter]["master_param"]
        found.append((join(parameter, main) if halves else main).cpu())
    return found[0], found[1]


def test_joined_halves_are_main_parameters(gpu_pool):
    joined, whole = gpu_pool.run(step_with_and_without_halves, world_size=1, init_process_group=False)[0]
    assert torch.equal(joined, whole)


def test_precision_aware_optimizer_needs_sharded_state(gpu_pool, qwen3_dir):
    """Where Transformer Engine is, which Megatron's config asks for."""
    config = {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True}
    with pytest.raises(WorkerError, match="use_precision_aware_optimizer=True with use_distributed_optimizer=False"):
        gpu_pool.run(
            fit_arithmetic,
            qwen3_dir,
            {"use_distributed_optimizer": False},
            1,
            max_steps=1,
            optimizer=config,
            trainer=TRAINER,
            world_size=1,
            init_process_group=False,
        )
