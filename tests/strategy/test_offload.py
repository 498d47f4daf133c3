"""Storages are emptied and filled again; on the CPU the bookkeeping is the same as on a GPU."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron_rl.callbacks.weight_average import WeightAverage
from lightning_megatron_rl.strategy.megatron import MegatronStrategy
from lightning_megatron_rl.strategy.offload import Offloader
from tests.checkpoints.test_keeping import shards
from tests.modules.runs import fit_grpo
from tests.training import Run, fit_sft

CPU = torch.device("cpu")


def test_views_of_a_storage_leave_and_come_back_together():
    buffer = torch.arange(16.0)
    first, second = buffer[:4], buffer.view(4, 4)[2:]
    offloader = Offloader(CPU)
    report = offloader.offload("x", [first, second, torch.empty(0)])
    assert report.num_bytes == buffer.numel() * 4  # once, not once per view
    assert buffer.untyped_storage().nbytes() == 0
    assert offloader.away == ("x",)
    assert offloader.offload("x", [first]).num_bytes == 0  # away already
    assert offloader.reload().num_bytes == report.num_bytes
    assert torch.equal(buffer, torch.arange(16.0))
    assert torch.equal(second, torch.arange(8.0, 16.0).view(2, 4))
    assert offloader.reload().num_bytes == 0


def test_what_need_not_be_kept_comes_back_as_zeros():
    gradients = torch.ones(8)
    offloader = Offloader(CPU)
    offloader.offload("gradients", [gradients], keep=False)
    offloader.reload()
    assert gradients.abs().sum() == 0


def test_hosts_copies_are_used_again():
    values = torch.randn(8)
    offloader = Offloader(CPU)
    for _ in range(2):
        offloader.offload("x", [values])
        (host,) = offloader._hosts.values()
        offloader.reload()
    assert offloader._hosts == {values.untyped_storage()._cdata: host}


def test_unknown_part_is_refused():
    with pytest.raises(ValueError, match=r"offload_while_sampling=\['weights'\]: \['weights'\] is none of"):
        MegatronStrategy(offload_while_sampling=["weights"])


ALL = {"offload_while_sampling": ["optimizer", "gradients", "parameters"]}


def fit_both(model: Path, world_size: int, options: dict[str, Any]) -> tuple[Run, Run]:
    """The same run with everything in its place, and with everything moved away while responses are sampled."""
    return fit_grpo(model, {}, world_size, **options), fit_grpo(model, ALL, world_size, **options)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_run_that_offloads_computes_the_same(worker_pool, qwen3_dir, precision):
    """Bit by bit: fp32 main weights, moments and parameters come back as they were."""
    options = {"trainer": {"precision": precision}}
    stayed, moved = worker_pool.run(fit_both, qwen3_dir, 1, options, world_size=1, init_process_group=False)[0]
    for mine, theirs in zip(moved.steps, stayed.steps, strict=True):
        for name in ("policy/loss", "policy/grad_norm"):
            assert mine[name] == theirs[name], name
    assert all(torch.equal(moved.weights[name], weight) for name, weight in stayed.weights.items())
    assert "time/offload_s" in moved.steps[-1]
    assert "time/offload_s" not in stayed.steps[-1]
    assert moved.steps[-1]["perf/offloaded_gb"] > 0


class UsesItsMemory(pl.Callback):
    """Saves after the second step and while the sampler is at work in the validation that follows, or fails there."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.directory is not None and trainer.global_step == 2:
            trainer.save_checkpoint(self.directory / "before.ckpt")

    def on_validation_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:  # before the module's
        if self.directory is None:
            raise ValueError("of a hook")
        trainer.save_checkpoint(self.directory / "during.ckpt")


def use_while_sampling(model: Path, world_size: int, directory: Path) -> tuple[bool, str]:
    """Whether both checkpoints have the same tensors, and the error of a run that fails under `WeightAverage`."""
    strategy = {"offload_while_sampling": ["optimizer", "gradients", "parameters"]}
    trainer = {"val_check_interval": 2, "check_val_every_n_epoch": None}
    fit_grpo(model, strategy, world_size, callbacks=[UsesItsMemory(directory)], trainer=trainer)
    with pytest.raises(Exception) as error:
        fit_grpo(model, strategy, world_size, callbacks=[WeightAverage(), UsesItsMemory(None)], trainer=trainer)
    return shards(directory / "before.ckpt") == shards(directory / "during.ckpt"), str(error.value)


def test_hooks_of_a_validation_may_save_and_fail(worker_pool, qwen3_dir, tmp_path):
    """Fails when what they read is still in the host's memory: the process dies of it."""
    arguments = (use_while_sampling, qwen3_dir, 1, tmp_path)
    ((same, error),) = worker_pool.run(*arguments, world_size=1, init_process_group=False)
    assert same
    assert error == "of a hook"


def warnings_of_sft(model: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit_sft(model, ALL, 1, steps=1)
    return [str(warning.message) for warning in found]


def test_warns_where_nobody_samples(worker_pool, qwen3_dir):
    found = worker_pool.run(warnings_of_sft, qwen3_dir, world_size=1, init_process_group=False)[0]
    assert any("offload_while_sampling=['optimizer', 'gradients', 'parameters'] does nothing" in text for text in found)
