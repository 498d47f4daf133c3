"""Checkpoints in runs that are not quite the one that saved them: other settings, other places, outside of a fit."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron_rl.callbacks.weight_average import WeightAverage
from lightning_megatron_rl.checkpoints.main_parameters import MAIN
from lightning_megatron_rl.checkpoints.manifest import check_files, read_manifest
from lightning_megatron_rl.checkpoints.optimizer_state import slices
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.modules.training import TrainingSettings
from tests.notices import collected
from tests.training import SequenceDataModule, frozen_sequences, make_trainer


class FrozenEmbedding(SFTModule):
    """A module of the user's that does not train the embedding."""

    def configure_model(self) -> None:
        super().configure_model()
        for name, parameter in self.model[0].named_parameters():
            if "embedding" in name:
                parameter.requires_grad_(False)


class SavesAt(pl.Callback):
    """Saves in its own way, behind a step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class MainParameters(pl.Callback):
    """How far the model's weights are from those that the optimizer steps, where a run begins."""

    apart = 0.0

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        found = (own for part in trainer.strategy.optimizers[0].parts() for own in slices(part))
        for own in found:
            weights = own.parameter.detach().view(-1)[own.start : own.stop]
            self.apart = max(self.apart, float((weights - own.tensors[MAIN]).abs().max()))


def keeper(directory: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_top_k=-1, **options)


def make_module(model: Path, kind: type[SFTModule] = SFTModule, **optimizer: Any) -> SFTModule:
    from megatron.core.optimizer import OptimizerConfig

    return kind(str(model), train=TrainingSettings(optimizer=OptimizerConfig(**{"lr": 1e-2, **optimizer})))


def fit(
    module: SFTModule, *callbacks: pl.Callback, steps: int = 2, ckpt_path: str | None = None, **trainer: Any
) -> pl.Trainer:
    options = {"max_steps": steps, "callbacks": list(callbacks), "enable_checkpointing": True, **trainer}
    if not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        options["enable_checkpointing"] = False
    runner = make_trainer({}, 1, **options)
    runner.fit(module, SequenceDataModule(frozen_sequences(16), 4), ckpt_path=ckpt_path)
    return runner


def refusal(call: Any) -> str:
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def resume_otherwise(model: Path, directory: Path) -> dict[str, Any]:
    """Resume with other settings of the optimizer, and with other parameters frozen."""
    fit(make_module(model, FrozenEmbedding), keeper(directory))
    saved = str(directory / "step=2.ckpt")
    found: dict[str, Any] = {}
    for name, settings in {"same": {}, "other": {"weight_decay": 0.5, "adam_eps": 1e-3}}.items():
        with collected() as messages:
            fit(make_module(model, FrozenEmbedding, **settings), steps=3, ckpt_path=saved)
        found[name] = " ".join(message for message in messages if "optimizer" in message)
    found["trained"] = refusal(lambda: fit(make_module(model), steps=3, ckpt_path=saved))
    found["lr"] = refusal(lambda: fit(make_module(model, FrozenEmbedding, lr=1e-3), steps=3, ckpt_path=saved))
    return found


def test_a_resumed_run_says_what_it_does_not_take_of_its_settings(worker_pool, qwen3_dir, tmp_path):
    found = worker_pool.run(resume_otherwise, qwen3_dir, tmp_path, world_size=1, init_process_group=False)[0]
    assert found["same"] == ""
    assert (
        "the optimizer goes on as the checkpoint has it: eps 1e-08, not 0.001; weight_decay 0.01, not 0.5"
        in (found["other"])
    )
    assert "lacks 3 of 33 tensors of this run's optimizer (optimizer.state.exp_avg.embedding" in found["trained"]
    assert "with other parameters frozen" in found["trained"]
    assert "no parameters with the settings {'max_lr': 0.001" in found["lr"]


def resume_from_home(model: Path, home: Path) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        fit(make_module(model), keeper(home, save_last=True))
        first = read_manifest(home / "last.ckpt")["run_id"]
        fit(make_module(model), keeper(home, save_last=True), steps=3, ckpt_path="~/step=2.ckpt")
    return first, read_manifest(home / "last.ckpt")["run_id"]


def test_a_run_resumed_from_the_home_directory_is_the_same_run(worker_pool, qwen3_dir, tmp_path):
    """Taken for a new one, it would set its own last.ckpt aside."""
    first, second = worker_pool.run(resume_from_home, qwen3_dir, tmp_path, world_size=1, init_process_group=False)[0]
    assert first == second
    assert not list(tmp_path.glob("run-*"))


def save_over(model: Path, directory: Path) -> str:
    return refusal(lambda: fit(make_module(model), SavesAt(1, directory)))


def test_a_directory_that_is_no_checkpoint_is_not_replaced(worker_pool, qwen3_dir, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "table.csv").write_text("1")
    arguments = (save_over, qwen3_dir, tmp_path / "results")
    (message,) = worker_pool.run(*arguments, world_size=1, init_process_group=False)
    assert f"cannot save a checkpoint as {tmp_path / 'results'}: there is a directory with 1 entries (table.csv)" in (
        message
    )
    assert [path.name for path in tmp_path.rglob("*")] == ["results", "table.csv"]


def save_without_manifest(model: Path, path: Path) -> tuple[dict[str, Any], str]:
    """Save again where a checkpoint has lost its manifest, and then where there is something else beside it."""
    for _ in range(2):
        fit(make_module(model), SavesAt(1, path))
        files = read_manifest(path)["files"]
        check_files(path, read_manifest(path), verify=True)
        (path / "manifest.json").unlink()
    (path / "notes.txt").write_text("mine")
    return files, save_over(model, path)


def test_a_checkpoint_without_its_manifest_is_replaced(worker_pool, qwen3_dir, tmp_path):
    """Else a run that goes on from an older one could not save its `last.ckpt`."""
    arguments = (save_without_manifest, qwen3_dir, tmp_path / "last.ckpt")
    ((files, message),) = worker_pool.run(*arguments, world_size=1, init_process_group=False)
    assert "trainer.pt" in files
    assert "(hf, notes.txt, rng, ...) that is no checkpoint" in message
    assert (tmp_path / "last.ckpt" / "notes.txt").read_text() == "mine"


def validate_weights(model: Path, directory: Path) -> dict[str, Any]:
    """Validate weights that a fit has left, in the same process and in one of their own."""
    module, data = make_module(model), SequenceDataModule(frozen_sequences(16), 4)
    trainer = fit(module, keeper(directory, save_weights_only=True))
    path = str(directory / "step=1.ckpt")
    found = {"after": trainer.validate(module, data, ckpt_path=path), "best": trainer.validate(module, data, "best")}
    trainer.save_checkpoint(directory / "by_hand.ckpt")
    return found | {
        "fresh": make_trainer({}, 1).validate(make_module(model), data, ckpt_path=path),
        "has_optimizer": read_manifest(directory / "by_hand.ckpt")["has_optimizer"],
    }


def test_weights_only_are_validated_after_a_fit(worker_pool, qwen3_dir, tmp_path):
    """Where there is an optimizer, of the fit, it is not asked for; nor saved with weights that it has not made."""
    found = worker_pool.run(validate_weights, qwen3_dir, tmp_path, world_size=1, init_process_group=False)[0]
    assert found["after"] == found["fresh"] != found["best"]
    assert not found["has_optimizer"]


def save_averages(model: Path, directory: Path) -> dict[str, Any]:
    before = SavesAt(2, directory / "before.ckpt")
    trainer = fit(make_module(model), before, WeightAverage(0.5), keeper(directory), precision="bf16-mixed")
    trainer.save_checkpoint(directory / "after_fit.ckpt")
    seen = MainParameters()
    path = str(directory / "after_fit.ckpt")
    resumed = fit(make_module(model), WeightAverage(0.5), seen, steps=3, ckpt_path=path, precision="bf16-mixed")
    return {"apart": seen.apart, "count": resumed.strategy.averages["average"].count}


def test_averages_are_saved_as_they_are(worker_pool, qwen3_dir, tmp_path):
    """Of the moment, before and after an update of one step; after the fit with main parameters that are the model's.

    Fails when a checkpoint takes the files of one with an older average, and when a run resumed after the fit steps
    other weights (apart by 1e-2) than it computes gradients of.
    """
    found = worker_pool.run(save_averages, qwen3_dir, tmp_path, world_size=1, init_process_group=False)[0]
    before, behind = read_manifest(tmp_path / "before.ckpt"), read_manifest(tmp_path / "step=2.ckpt")
    assert (before["averages"], behind["averages"]) == ({"average": 1}, {"average": 2})
    assert before["files"]["sharded/__0_0.distcp"] != behind["files"]["sharded/__0_0.distcp"]
    assert found["count"] == 3
    assert 0 < found["apart"] <= 2.0**-8  # bf16 rounds weights of up to 2 by so much
    assert torch.finfo(torch.bfloat16).eps == 2.0**-7
