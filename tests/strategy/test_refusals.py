"""Runs that would go wrong are refused before weights are read, with the value, the arithmetic and a way out."""

import os
import shutil
import socket
from functools import partial
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import ReduceLROnPlateau
from torch import distributed as dist

from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.modules.training import TrainingSettings
from lightning_megatron_rl.strategy.megatron import MegatronStrategy
from lightning_megatron_rl.strategy.precision import MegatronPrecision
from lightning_megatron_rl.strategy.run_log import seed_megatron
from lightning_megatron_rl.verify.pool import WorkerError
from tests.training import SequenceDataModule, frozen_sequences, make_trainer


class ManualModule(SFTModule):
    automatic_optimization = False


class ClippingModule(SFTModule):
    """Clips in a way of its own, so that the Trainer's algorithm is nobody else's business."""

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        pass


class TorchOptimizerModule(SFTModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class ModulelessModule(pl.LightningModule):
    """A module as Lightning's tutorials have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(torch.ones(2)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def refusal(
    model: str,
    strategy: dict[str, Any],
    world_size: int,
    *,
    module: type[pl.LightningModule] = SFTModule,
    optimizer: dict[str, Any] | None = None,
    lr_scheduler: Any = None,
    trainer: dict[str, Any] | None = None,
    occupy_port: bool = False,
) -> str:
    """Return the error of a fit, as its type and message."""
    import os

    from megatron.core.optimizer import OptimizerConfig

    options = {"max_steps": 1, **(trainer or {})}
    train = TrainingSettings(OptimizerConfig(**(optimizer or {"lr": 1e-3})), lr_scheduler)
    policy = module() if module is ModulelessModule else module(model, train)
    held = socket.socket()
    try:
        if occupy_port and os.environ["RANK"] != "0":
            return ""  # only rank 0 serves there
        if occupy_port:
            held.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
            held.listen()
        # `strategy` of the Trainer: one that is not ours
        runner = pl.Trainer(**options) if "strategy" in options else make_trainer(strategy, world_size, **options)
        runner.fit(policy, SequenceDataModule(frozen_sequences(4), 4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        held.close()
    raise AssertionError("the run was not refused")


def refusals(cases: list[dict[str, Any]]) -> list[str]:
    """The errors of several fits, one after the other in the same processes."""
    return [refusal(**case) for case in cases]


def ask(pool: Any, cases: list[dict[str, Any]], world_size: int = 1) -> list[str]:
    cases = [{"strategy": {}, "world_size": world_size, **case} for case in cases]
    ranks = pool.run(refusals, cases, world_size=world_size, init_process_group=False)
    return ranks[0]


def test_settings_that_would_change_numbers(worker_pool, broken_model):
    """None of these reads a weight: this model's file has none of them."""
    expected = {
        "accumulate": (
            {"trainer": {"accumulate_grad_batches": 2}},
            ["ValueError", "accumulate_grad_batches=2", "Raise the data module's batch_size"],
        ),
        "manual": (
            {"module": ManualModule},
            ["ValueError", "ManualModule.automatic_optimization=False", "self.optimizers().step()"],
        ),
        "world": (
            {"strategy": {"tensor_model_parallel_size": 2}},
            ["ValueError", "tp(2) x pp(1) x cp(1) = 2 does not divide the world size 1", "launch a multiple of 2"],
        ),
        "strategy": (
            {"trainer": {"strategy": "auto", "accelerator": "cpu", "devices": 1, "logger": False}},
            ["TypeError", "SFTModule runs on MegatronStrategy", "SingleDeviceStrategy", "MegatronStrategy(...)"],
        ),
        "clip_grad": (
            {"optimizer": {"lr": 1e-3, "clip_grad": 0.5}},
            [
                "ValueError",
                "OptimizerConfig.clip_grad=0.5",
                "gradient_clip_val=None",
                "Remove clip_grad and set Trainer",
            ],
        ),
        "clipping": (
            {"trainer": {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}},
            ["ValueError", "gradient_clip_algorithm='value'", "set it to 'norm'"],
        ),
        "own clipping by value": (
            {"module": ClippingModule, "trainer": {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}},
            ["loaded weights are not finite"],
        ),
        "bf16-true": (
            {"trainer": {"precision": "bf16-true"}},
            ["ValueError", "use_distributed_optimizer=True", "= 8 bytes", "use_distributed_optimizer=False"],
        ),
        "learning rate": (
            {"optimizer": {"lr": None}},
            ["ValueError", "OptimizerConfig.lr is None", "OptimizerConfig(lr=1e-6)"],
        ),
    }
    messages = ask(worker_pool, [{"model": broken_model, **case} for case, _ in expected.values()])
    assert_each(messages, [parts for _, parts in expected.values()])


def test_modules_the_strategy_cannot_train(worker_pool, qwen3_dir):
    cases = [
        {"module": TorchOptimizerModule},
        {"module": ModulelessModule},
        {"optimizer": {"lr": 1e-3, "optimizer": "sgd"}},
        {"lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
        {"lr_scheduler": partial(ReduceLROnPlateau, monitor="policy/loss")},
    ]
    expected = [
        ["TypeError", "configure_optimizers returned AdamW", "self.trainer.strategy.build_optimizer(OptimizerConfig("],
        ["TypeError", "ModulelessModule.model is NoneType", "`configure_model` must assign to `self.model`"],
        ["ValueError", "OptimizerConfig.optimizer='sgd'", "MegatronStrategy(use_distributed_optimizer=False)"],
        ["ValueError", "train.lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau: ", "CosineAnnealingLR"],
        ["ValueError", "train.lr_scheduler=lightning.pytorch.cli.ReduceLROnPlateau: ", "CosineAnnealingLR"],
    ]
    assert_each(ask(worker_pool, [{"model": str(qwen3_dir), **case} for case in cases]), expected)


def test_models_that_are_not_there(worker_pool, qwen3_dir, tmp_path):
    """Directories without a part, a name that cannot be downloaded, a layout that the model cannot be split into."""
    no_config, no_weights = (tmp_path / name for name in ("no_config", "no_weights"))
    for directory, pattern in ((no_config, "config.json"), (no_weights, "*.safetensors")):
        shutil.copytree(qwen3_dir, directory, ignore=shutil.ignore_patterns(pattern))
    models = [str(no_config), str(no_weights), "nobody/no-such-model", str(tmp_path / "nothing")]
    expected = [
        ["ValueError", str(no_config), "no config.json", "`save_pretrained`"],
        ["ValueError", str(no_weights), "no *.safetensors", "`save_pretrained(..., safe_serialization=True)`"],
        ["ValueError", "cannot download model 'nobody/no-such-model'"],
        ["ValueError", str(tmp_path / "nothing"), "neither a directory nor a hub name", "check the path"],
    ]
    assert_each(ask(worker_pool, [{"model": model} for model in models]), expected)


def test_layout_the_model_cannot_be_split_into(worker_pool, broken_model):
    """Three ranks for four layers or four heads; refused on every rank before a weight is read."""
    strategies = [{"pipeline_model_parallel_size": 3}, {"tensor_model_parallel_size": 3}]
    messages = ask(worker_pool, [{"model": broken_model, "strategy": strategy} for strategy in strategies], 3)
    expected = [
        ["ValueError", "num_hidden_layers=4 over pipeline_model_parallel_size=3", "4 % 3 = 1", "divides 4"],
        ["ValueError", "num_attention_heads=4 over tensor_model_parallel_size=3", "4 % 3 = 1", "among 1, 2, 4"],
    ]
    assert_each(messages, expected)


def test_port_in_use_is_named(worker_pool, broken_model):
    messages = ask(worker_pool, [{"model": broken_model, "occupy_port": True}], 2)
    assert_each(messages, [["RuntimeError", "is in use: 127.0.0.1:", "unset MASTER_PORT", "another port"]])


@pytest.mark.parametrize("precision", ["16-true", "64-true"])
def test_precision_that_megatron_does_not_run(precision):
    with pytest.raises(ValueError, match=rf"precision='{precision}' .*use precision='32-true', .* or '16-mixed'"):
        pl.Trainer(accelerator="cpu", devices=1, strategy=MegatronStrategy(), precision=precision, logger=False)


def test_fp16_on_a_cpu_is_a_plugin():
    """Lightning itself turns "16-mixed" into "bf16-mixed" on a CPU, and says so; a plugin is taken as it is."""
    options = {"accelerator": "cpu", "devices": 1, "logger": False}
    with pytest.warns(UserWarning, match="16-mixed.*not supported on CPU.*bf16"):
        trainer = pl.Trainer(strategy=MegatronStrategy(), precision="16-mixed", **options)
    assert trainer.precision_plugin.precision == "bf16-mixed"
    trainer = pl.Trainer(strategy=MegatronStrategy(), plugins=[MegatronPrecision("16-mixed")], **options)
    assert trainer.precision_plugin.precision == "16-mixed"


def test_load_from_checkpoint_points_to_the_export(tmp_path):
    with pytest.raises(ValueError, match=r"SFTModule\.load_from_checkpoint\(.*ckpt_path=.*HFExport.*SFTModule\(model="):
        SFTModule.load_from_checkpoint(tmp_path)


def assert_each(messages: list[str], expected: list[list[str]]) -> None:
    """Each message has all its parts: type, value, arithmetic, remedy."""
    assert len(messages) == len(expected)
    for message, parts in zip(messages, expected, strict=True):
        for part in parts:
            assert part in message, f"{part!r} is not in {message!r}"


def seed_by_rank() -> None:
    with mock.patch.dict(os.environ, PL_GLOBAL_SEED=str(7 + dist.get_rank())):
        seed_megatron()


def test_a_seed_of_its_own_on_each_rank_is_refused(worker_pool):
    with pytest.raises(
        WorkerError, match=r"the run's seed is 7 on rank 0 and 8 on rank 1: .* the same number on every"
    ):
        worker_pool.run(seed_by_rank, world_size=2)
