"""Lightning's checkpoint interfaces on directories: `ckpt_path`, `save_checkpoint`, failed saves, random numbers."""

import random
import re
import resource
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron_rl.data.loader import EvaluationLoader, GlobalBatches
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.strategy import checkpoint as checkpoint_io
from lightning_megatron_rl.strategy.manifest import read_manifest
from tests.training import Recorder, SequenceDataModule, frozen_sequences, make_trainer


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

    return SFTModule(str(model), OptimizerConfig(lr=1e-3, adam_eps=1e-3), max_tokens_per_microbatch=64)


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
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trainer.global_rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        trainer.save_checkpoint(path)
    except BaseException as error:  # torch's CheckpointException is no Exception
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
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
