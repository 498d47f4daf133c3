"""Saving beside training: what is written, what is there meanwhile, what stays, and what a failed write leaves."""

import os
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron_rl.strategy.manifest import is_checkpoint, read_manifest
from tests.strategy.test_saving import make_module
from tests.training import SequenceDataModule, frozen_sequences, make_trainer

Notes = dict[str, Any]


class Watch(pl.Callback):
    """Holds the first save back until the second step was taken, and looks around then.

    It runs before `ModelCheckpoint`, which is always the last callback.
    """

    def __init__(self, directory: Path, holds: bool) -> None:
        self.directory, self.holds = directory, holds
        self.gate = threading.Event()
        self.meanwhile: Notes = {}

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        keep = strategy.keep

        def hold_first(checkpoint: Any) -> None:
            if self.holds and trainer.global_step == 1:
                strategy._queue.submit(self._wait)
            keep(checkpoint)

        strategy.keep = hold_first

    def _wait(self) -> None:
        assert self.gate.wait(30.0), "the next step was not taken while this was waiting"

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self.meanwhile = look(self.directory)
            trainer.strategy.barrier()
            self.gate.set()


def look(directory: Path) -> Notes:
    """Names in a directory: complete checkpoints, others, and where links point to."""
    entries = sorted(directory.iterdir()) if directory.exists() else []
    return {
        "complete": [entry.name for entry in entries if is_checkpoint(entry)],
        "others": [entry.name for entry in entries if not is_checkpoint(entry)],
        "links": {entry.name: os.readlink(entry) for entry in entries if entry.is_symlink()},
    }


def fit_and_keep(
    model: Path, directory: Path, world_size: int, strategy: dict[str, Any], keep: dict[str, Any], *, holds: bool
) -> Notes:
    """Three steps, each saved; returns what was there before the second was saved, and in the end."""
    watch = Watch(directory, holds)
    keeper = ModelCheckpoint(directory, "{step}", every_n_train_steps=1, **keep)
    trainer = make_trainer(strategy, world_size, max_steps=3, enable_checkpointing=True, callbacks=[watch, keeper])
    trainer.fit(make_module(model), SequenceDataModule(frozen_sequences(12), 4))
    return {"meanwhile": watch.meanwhile, "end": look(directory), "save_last": keeper.save_last}


def shards(path: Path) -> dict[str, Any]:
    """Size and checksum of each file with weights and optimizer state."""
    return {name: record for name, record in read_manifest(path)["files"].items() if name.endswith(".distcp")}


@pytest.fixture(scope="module")
def sync(worker_pool, qwen3_dir, tmp_path_factory) -> Path:
    """The three checkpoints of a run that waits for each."""
    directory = tmp_path_factory.mktemp("sync")
    arguments = (qwen3_dir, directory, 2, {"async_save": False}, {"save_top_k": -1})
    worker_pool.run(fit_and_keep, *arguments, holds=False, world_size=2, init_process_group=False)
    return directory


@pytest.fixture(scope="module")
def held(worker_pool, qwen3_dir, tmp_path_factory) -> tuple[Path, list[Notes]]:
    """The same run whose first checkpoint is not written before the second step was taken."""
    directory = tmp_path_factory.mktemp("held")
    arguments = (qwen3_dir, directory, 2, {}, {"save_top_k": -1})
    notes = worker_pool.run(fit_and_keep, *arguments, holds=True, world_size=2, init_process_group=False)
    return directory, notes


def test_training_goes_on_while_a_checkpoint_is_written(held):
    """And what it will be is no checkpoint meanwhile, though it has its name already.

    Without the name `ModelCheckpoint` would give it to another one.
    """
    directory, notes = held
    for mine in notes:
        assert mine["meanwhile"]["complete"] == []
        assert mine["meanwhile"]["others"] == [".step=1.ckpt.incomplete", "step=1.ckpt"]
    assert look(directory) == {"complete": [f"step={step}.ckpt" for step in (1, 2, 3)], "others": [], "links": {}}


def test_what_is_written_is_of_the_moment_of_the_save(held, sync):
    """Bitwise, though the step that followed has changed every tensor. Fails without the copies."""
    directory, _ = held
    for step in (1, 2, 3):
        assert shards(directory / f"step={step}.ckpt") == shards(sync / f"step={step}.ckpt"), step
    assert shards(sync / "step=1.ckpt") != shards(sync / "step=2.ckpt")


def test_replicas_share_the_writing(sync):
    """Two data-parallel ranks write about the same number of bytes. Fails without the fully parallel save."""
    sizes = [record["bytes"] for record in shards(sync / "step=1.ckpt").values()]
    assert len(sizes) == 2
    assert max(sizes) < 1.5 * min(sizes)
