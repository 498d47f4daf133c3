"""Lightning's checkpoint interfaces on directories: `ckpt_path`, `save_checkpoint`, failed saves, random numbers."""

import datetime
import logging
import random
import re
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

from lightning_megatron_rl.checkpoints import format as checkpoint_io
from lightning_megatron_rl.checkpoints.manifest import read_manifest
from lightning_megatron_rl.checkpoints.saving import RunFacts, _load_generators
from lightning_megatron_rl.data.loader import EvaluationLoader, GlobalBatches
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.modules.training import TrainingSettings
from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.strategy.megatron import MegatronStrategy
from lightning_megatron_rl.utilities import notices
from tests.full_disk import files_of_at_most
from tests.training import Recorder, SequenceDataModule, fit_sft, frozen_sequences, make_trainer


class DrawsAndNotes(pl.Callback):
    """Draws from every generator in each step; notes their states when a checkpoint is saved and when a fit starts."""

    def __init__(self) -> None:
        self.at_start: dict[str, Any] = {}
        self.at_save: dict[str, Any] = {}

    def on_train_start(self, *_: Any) -> None:
        self.at_start = checkpoint_io.rng_state()

    def on_train_batch_start(self, *_: Any) -> None:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        torch.rand(3)
        np.random.standard_normal()  # one of a pair: the other half is state as well
        random.random()
        with get_cuda_rng_tracker().fork():
            torch.rand(3)

    def on_save_checkpoint(self, *_: Any) -> None:
        self.at_save = checkpoint_io.rng_state()


class OrderedDataModule(SequenceDataModule):
    """Without a `DataLoader`, whose iterator draws a seed from torch before training starts."""

    def train_dataloader(self) -> Any:
        shard = self.trainer.distributed_sampler_kwargs
        return EvaluationLoader(self.sequences, GlobalBatches(len(self.sequences), self.batch_size, **shard))


def make_module(model: Path) -> SFTModule:
    from megatron.core.optimizer import OptimizerConfig

    return SFTModule(
        str(model),
        train=TrainingSettings(optimizer=OptimizerConfig(lr=1e-3, adam_eps=1e-3), max_tokens_per_microbatch=64),
    )


def save_and_resume(model: Path, directory: Path, world_size: int) -> dict[str, Any]:
    """Save with `ModelCheckpoint` and `save_checkpoint`, resume from "last" and from the path."""

    def fit(max_steps: int, ckpt_path: str | None = None) -> tuple[pl.Trainer, DrawsAndNotes, list[dict[str, float]]]:
        notes, recorder = DrawsAndNotes(), Recorder()
        keeper = ModelCheckpoint(directory, "{step}", every_n_train_steps=2, save_last=True)
        trainer = make_trainer(
            {"tensor_model_parallel_size": 2},
            world_size,
            max_steps=max_steps,
            enable_checkpointing=True,
            callbacks=[keeper, notes, recorder],
        )
        trainer.fit(make_module(model), OrderedDataModule(frozen_sequences(16), 4), ckpt_path=ckpt_path)
        return trainer, notes, recorder.steps

    first, before, _ = fit(2)
    by_hand = directory / "by_hand.ckpt"
    first.save_checkpoint(by_hand)
    states = {"saved": before.at_save, "fresh": before.at_start}
    last, after, last_steps = fit(4, ckpt_path="last")  # first: every run saves a new "last"
    _, by_path, by_path_steps = fit(3, ckpt_path=str(by_hand))
    return {
        "states": {**states, "last": after.at_start, "by_hand": by_path.at_start},
        "global_step": last.global_step,
        "losses": [[step["policy/loss"] for step in steps] for steps in (last_steps, by_path_steps)],
        "layout": read_manifest(by_hand)["layout"],
    }


def assert_same(left: Any, right: Any, where: str) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same(left[key], right[key], f"{where}/{key}")
    elif isinstance(left, tuple):
        for index, (mine, theirs) in enumerate(zip(left, right, strict=True)):
            assert_same(mine, theirs, f"{where}/{index}")
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right), where
    else:
        assert left == right, where


def test_last_and_saved_by_hand_resume_with_their_random_numbers(worker_pool, qwen3_dir, tmp_path):
    """Torch, numpy, Python and Megatron's tracker go on where the checkpoint was saved, each rank with its own.

    Fails without `set_rng_state`, and with rank 0's states on every rank.
    """
    facts = worker_pool.run(save_and_resume, qwen3_dir, tmp_path, 2, world_size=2, init_process_group=False)
    for mine in facts:
        states = mine["states"]
        assert_same(states["last"], states["saved"], "last")
        assert_same(states["by_hand"], states["saved"], "by_hand")
        for name in ("torch", "numpy", "python", "megatron"):
            with pytest.raises(AssertionError):
                assert_same(states["saved"][name], states["fresh"][name], name)
        assert mine["global_step"] == 4
        assert [len(losses) for losses in mine["losses"]] == [2, 1]
        assert mine["losses"][0][0] == mine["losses"][1][0], "the third step, once from each"
        assert mine["layout"]["tensor_model_parallel_size"] == 2
    with pytest.raises(AssertionError):  # tensor-parallel ranks differ on purpose
        assert_same(facts[0]["states"]["saved"]["megatron"], facts[1]["states"]["saved"]["megatron"], "ranks")


def save_into_a_full_disk(model: Path, directory: Path, strategy: dict[str, Any], world_size: int) -> str:
    """Save twice under one name; in the second save rank 1 can write files of at most 100 bytes."""
    trainer = make_trainer({"timeout_s": 30.0, **strategy}, world_size, max_steps=1)
    trainer.fit(make_module(model), SequenceDataModule(frozen_sequences(4), 4))
    path = directory / "good.ckpt"
    trainer.save_checkpoint(path)
    (path / "mark").write_text("of the first save")
    try:
        with files_of_at_most(100) if trainer.global_rank == 1 else nullcontext():
            trainer.save_checkpoint(path)
    except BaseException as error:  # torch's CheckpointException is no Exception
        return f"{type(error).__name__}: {error}"
    raise AssertionError("the save was not interrupted")


# With two replicas the second writes no shard, only the states of its generators.
@pytest.mark.parametrize("strategy", [{"tensor_model_parallel_size": 2}, {}], ids=["shards", "random_numbers"])
def test_interrupted_save_keeps_the_previous_checkpoint(worker_pool, qwen3_dir, tmp_path, strategy):
    """A rank that cannot write ends the save on every rank, and what stood under the name before still does.

    Fails when the directory is written in place, and when the other ranks wait for the one that failed.
    """
    messages = worker_pool.run(
        save_into_a_full_disk, qwen3_dir, tmp_path, strategy, 2, world_size=2, init_process_group=False, timeout=120.0
    )
    for message in messages:
        assert "rank 1 cannot write the checkpoint" in message
        assert str(tmp_path / "good.ckpt") in message
        assert "Choose a writable" in message
    assert (tmp_path / "good.ckpt" / "mark").is_file()
    assert read_manifest(tmp_path / "good.ckpt")["has_optimizer"]


def save_with_little_room(model: Path, directory: Path, world_size: int) -> str:
    """Save where rank 0's file system has room for 1000 bytes more than nothing."""
    trainer = make_trainer({}, world_size, max_steps=1)
    trainer.fit(make_module(model), SequenceDataModule(frozen_sequences(4), 4))
    checkpoint_io.free_bytes, real = lambda path: 1000, checkpoint_io.free_bytes
    try:
        trainer.save_checkpoint(directory / "new.ckpt")
    except OSError as error:
        return str(error)
    finally:
        checkpoint_io.free_bytes = real
    raise AssertionError("the save was not refused")


def test_too_little_room_is_found_before_anything_is_written(worker_pool, qwen3_dir, tmp_path):
    """With the arithmetic, on every rank."""
    arguments = (save_with_little_room, qwen3_dir, tmp_path, 2)
    for message in worker_pool.run(*arguments, world_size=2, init_process_group=False):
        found = re.search(
            r"2 rank\(s\) have ([\d,]+) bytes to write, .* has 1,000 bytes free, ([\d,]+) too few", message
        )
        needed, lacking = (int(number.replace(",", "")) for number in found.groups())
        assert needed - 1000 == lacking
        assert needed > 1 << 20  # a margin for what is no tensor
        assert "save_top_k" in message
    assert list(tmp_path.iterdir()) == []


class OwnTensors(SFTModule):
    """A user's module with a buffer that it changes, one that is not persistent, a parameter and a metric."""

    def __init__(self, model: str, optimizer: Any, variant: str = "") -> None:
        super().__init__(model, TrainingSettings(optimizer, max_tokens_per_microbatch=64))
        if variant != "without":
            self.register_buffer("seen", torch.zeros(2 if variant != "longer" else 3))
        if variant == "extra":
            self.register_buffer("more", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.lengths = torchmetrics.MeanMetric()
        self.lengths.persistent(True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.scratch += 1
        if hasattr(self, "seen"):
            self.seen += 1
            with torch.no_grad():
                self.scale *= 2
            self.lengths.update(float(len(batch)))

    def own(self) -> dict[str, list[float]]:
        state = {
            "seen": self.seen,
            "scratch": self.scratch,
            "scale": self.scale.detach(),
            "mean": self.lengths.compute(),
        }
        return {name: value.reshape(-1).tolist() for name, value in state.items()}


class LoadsByName(OwnTensors):
    strict_loading = False


def save_and_load_own_tensors(model: Path, directory: Path, world_size: int) -> dict[str, Any]:
    """What a module of the user's holds after two steps, after a resume from there, in `validate`, and refusals."""
    from megatron.core.optimizer import OptimizerConfig

    def fit(steps: int, ckpt_path: Path | None, variant: str = "", cls: Any = OwnTensors) -> Any:
        module = cls(str(model), OptimizerConfig(lr=1e-3), variant)
        trainer = make_trainer({}, world_size, max_steps=steps)
        trainer.fit(module, SequenceDataModule(frozen_sequences(4 * steps), 4), ckpt_path=ckpt_path)
        return trainer, module

    def refusal(variant: str) -> str:
        with pytest.raises(ValueError, match="outside `model`") as error:
            fit(2, path, variant)
        return str(error.value)

    path = directory / "own.ckpt"
    trainer, module = fit(2, None)
    trainer.save_checkpoint(path)
    found = {"saved": module.own(), "resumed": fit(3, path)[1].own()}
    evaluated = OwnTensors(str(model), OptimizerConfig(lr=1e-3))
    make_trainer({}, world_size).validate(evaluated, SequenceDataModule(frozen_sequences(4), 4), ckpt_path=path)
    found["validated"] = evaluated.own()
    found["refusals"] = {variant: refusal(variant) for variant in ("without", "extra", "longer")}
    found["by name"] = fit(2, path, "extra", LoadsByName)[1].own()
    return found


def test_what_a_module_registers_itself_is_saved_and_restored(worker_pool, qwen3_dir, tmp_path):
    """Persistent buffers, parameters and the persistent state of metrics; named where they do not fit.

    Fails without the buffers in checkpoints, and with `strict=False` whatever the module says.
    """
    for found in worker_pool.run(
        save_and_load_own_tensors, qwen3_dir, tmp_path, 2, world_size=2, init_process_group=False
    ):
        assert found["saved"] == {"seen": [2.0, 2.0], "scratch": [2.0], "scale": [4.0], "mean": [2.0]}
        assert found["resumed"] == {"seen": [3.0, 3.0], "scratch": [1.0], "scale": [8.0], "mean": [2.0]}
        assert found["validated"] == {**found["saved"], "scratch": [0.0]}
        assert "not in the module: seen" in found["refusals"]["without"]
        assert "not in the checkpoint: more" in found["refusals"]["extra"]
        assert "of another shape: seen (2,) != (3,)" in found["refusals"]["longer"]
        assert all("strict_loading=False" in message for message in found["refusals"].values())
        assert found["by name"] == found["saved"] | {"scratch": [0.0]}


class SavesInHooks(pl.Callback):
    """Saves in the second step, and keeps what was told then, by hook."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.told: dict[str, list[str]] = {}

    def save(self, trainer: pl.Trainer, hook: str) -> None:
        records: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[method-assign]
        logging.getLogger("lightning_megatron_rl").addHandler(handler)
        trainer.save_checkpoint(self.directory / f"{hook}.ckpt")
        logging.getLogger("lightning_megatron_rl").removeHandler(handler)
        self.told[hook] = [record.getMessage() for record in records]

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            self.save(trainer, "start")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self.save(trainer, "end")

    def on_validation_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "validation")


def save_in_hooks(model: Path, directory: Path) -> dict[str, list[str]]:
    saves = SavesInHooks(directory)
    fit_sft(model, {}, 1, steps=2, callbacks=[saves], trainer={"val_check_interval": 2})
    return saves.told


def test_a_checkpoint_in_the_middle_of_a_step_says_what_it_leaves_out(worker_pool, qwen3_dir, tmp_path):
    told = worker_pool.run(save_in_hooks, qwen3_dir, tmp_path, world_size=1, init_process_group=False)[0]
    assert {hook: len(messages) for hook, messages in told.items()} == {"start": 1, "end": 0, "validation": 0}
    assert "start.ckpt was saved in the middle of a step: a run that resumes" in told["start"][0]


class NotPlainData(pl.Callback):
    """Has state that is not plain data."""

    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"when": datetime.timedelta(seconds=3)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def trust_on_request(model: Path, directory: Path, world_size: int) -> list[Any]:
    """What a fit from a checkpoint with an object in it ends with, by `weights_only`."""

    def fit(steps: int, **options: Any) -> tuple[pl.Trainer, Any]:
        callback = NotPlainData()
        trainer = make_trainer({}, world_size, max_steps=steps, callbacks=[callback])
        trainer.fit(make_module(model), SequenceDataModule(frozen_sequences(8), 4), **options)
        return trainer, callback.state

    path = directory / "object.ckpt"
    fit(1)[0].save_checkpoint(path)
    found: list[Any] = []
    for weights_only in (None, True, False):
        try:
            found.append(fit(2, ckpt_path=path, weights_only=weights_only)[1])
        except ValueError as error:
            found.append(str(error))
    return found


def test_weights_only_false_trusts_a_checkpoint(worker_pool, qwen3_dir, tmp_path):
    """As the refusal advises. Lightning does not pass the argument on to strategies that load after `setup`."""
    arguments = (trust_on_request, qwen3_dir, tmp_path, 1)
    (found,) = worker_pool.run(*arguments, world_size=1, init_process_group=False)
    for message in found[:2]:
        assert "load it with Trainer.fit(..., weights_only=False)" in message
    assert found[2] == {"when": datetime.timedelta(seconds=3)}


class NoPlainFunction(pl.Callback):
    """Its state cannot be pickled."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 3, "later": [lambda: 0]}


def save_what_cannot_be_pickled(model: Path, directory: Path, world_size: int) -> str:
    trainer = make_trainer({}, world_size, max_steps=1, callbacks=[NoPlainFunction()])
    trainer.fit(make_module(model), SequenceDataModule(frozen_sequences(4), 4))
    with pytest.raises(ValueError, match="cannot be written to a checkpoint") as error:
        trainer.save_checkpoint(directory / "function.ckpt")
    return str(error.value)


def test_state_that_cannot_be_pickled_is_named_on_every_rank(worker_pool, qwen3_dir, tmp_path):
    """Rank 0 alone writes it: the other would wait."""
    arguments = (save_what_cannot_be_pickled, qwen3_dir, tmp_path, 2)
    for message in worker_pool.run(*arguments, world_size=2, init_process_group=False):
        assert "['callbacks']['NoPlainFunction']['later'] is of type list" in message
        assert "Leave it out of the state_dict()" in message
    assert not list(tmp_path.iterdir())


def save_to_urls(model: Path, directory: Path, world_size: int) -> dict[str, str]:
    """The refusals of URLs wherever a checkpoint's place can be given."""
    trainer = make_trainer({}, world_size, max_steps=1)
    trainer.fit(make_module(model), SequenceDataModule(frozen_sequences(4), 4))

    def refusal(call: Any) -> str:
        with pytest.raises(ValueError, match="is a URL") as error:
            call()
        return str(error.value)

    def fit(ckpt_path: str | None = None, **options: Any) -> Any:
        runner = make_trainer({}, world_size, max_steps=2, **options)
        return lambda: runner.fit(make_module(model), SequenceDataModule(frozen_sequences(8), 4), ckpt_path=ckpt_path)

    keepers = {url: ModelCheckpoint(url) for url in ("memory://a/b", "local:///tmp/b", "file:///tmp/b")}
    saves = {"enable_checkpointing": True}
    return {
        "save_checkpoint": refusal(lambda: trainer.save_checkpoint("memory://a/by_hand.ckpt")),
        "ckpt_path": refusal(fit("memory://a/last.ckpt")),
        "default_root_dir": refusal(fit(**saves, default_root_dir="memory://a")),
        "logger": refusal(fit(**saves, logger=CSVLogger("memory://a"))),
        **{url: refusal(fit(**saves, callbacks=[keeper])) for url, keeper in keepers.items()},
        "made": ", ".join(entry.name for entry in Path().absolute().iterdir() if ":" in entry.name),
    }


def test_urls_are_refused_and_no_directory_of_that_name_is_made(worker_pool, qwen3_dir, tmp_path):
    arguments = (save_to_urls, qwen3_dir, tmp_path, 1)
    (found,) = worker_pool.run(*arguments, world_size=1, init_process_group=False)
    assert found.pop("made") == ""
    for setting, message in found.items():
        assert "Give a plain path" in message, setting
    assert found["memory://a/b"].startswith("ModelCheckpoint(dirpath)='memory://a/b' is a URL (memory)")
    assert "is a URL (file)" in found["file:///tmp/b"]
    assert found["default_root_dir"].startswith("Trainer(default_root_dir)='memory://a'")
    assert "CSVLogger(save_dir)" in found["logger"]


class CopiesElsewhere(TorchCheckpointIO):
    """A user's plugin."""


@pytest.mark.parametrize("plugin", [CopiesElsewhere(), AsyncCheckpointIO()], ids=lambda it: type(it).__name__)
def test_checkpoint_io_plugins_are_refused(plugin):
    with pytest.raises(ValueError, match=rf"plugins=\[{type(plugin).__name__}\]\): MegatronStrategy writes and reads"):
        pl.Trainer(accelerator="cpu", strategy=MegatronStrategy(), plugins=[plugin], logger=False)


def test_another_layout_is_named_as_in_the_table_at_start(tmp_path, caplog):
    here = RunFacts(ParallelLayout(2, sequence_parallel=True), 2, "run", True, verify=True, fall_back=True)
    saved = {"layout": asdict(ParallelLayout(1, 2)), "world_size": 2}
    assert _load_generators(tmp_path, saved, here) is None
    assert (
        "(world 2 = tp 1 x pp 2 x cp 1 x dp 1; this run: world 2 = tp 2 x pp 1 x cp 1 x dp 1, sequence parallel)"
        in caplog.text
    )
    notices.forget()
