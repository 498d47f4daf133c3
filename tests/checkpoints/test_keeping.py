"""Saving beside training: what is written, what is there meanwhile, what stays, and what a failed write leaves."""

import logging
import os
import re
import resource
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron_rl.checkpoints.manifest import is_checkpoint, read_manifest
from lightning_megatron_rl.utilities.files import Lock
from tests.checkpoints.test_saving import make_module
from tests.selection import by_default
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
        keeper = strategy.checkpoints.keeper
        keep = keeper.keep

        def hold_first(checkpoint: Any, *, later: bool) -> None:
            if self.holds and trainer.global_step == 1:
                keeper._queue.submit(self._wait)
            keep(checkpoint, later=later)

        keeper.keep = hold_first

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
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(listener)
    before = psutil.Process().children(recursive=True)  # of another job of this worker
    try:
        trainer.fit(make_module(model), SequenceDataModule(frozen_sequences(12), 4))
    finally:
        logger.removeHandler(listener)
    trainer.strategy.barrier()  # rank 0 removes, and the others do not wait for that
    children = [str(child) for child in psutil.Process().children(recursive=True) if child not in before]
    end = look(directory)
    said = [line for line in said if "complete after" in line]
    return {
        **{"meanwhile": watch.meanwhile, "end": end, "save_last": keeper.save_last, "children": children},
        "said": said,
    }


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
        assert mine["meanwhile"]["others"] == [".step=1.ckpt.lightning-megatron-rl-incomplete", "step=1.ckpt"]
        assert mine["children"] == [], "a process that a save has started would outlive a run that is killed"
    assert look(directory) == {"complete": [f"step={step}.ckpt" for step in (1, 2, 3)], "others": [], "links": {}}


def test_the_log_says_how_long_a_save_took(held):
    """For the time that a scheduler must leave a run that it stops."""
    directory, ((first, *others), silent) = held[0], [notes["said"] for notes in held[1]]
    assert silent == [], "rank 1"
    waited, complete = re.fullmatch(
        rf"{directory}/step=1.ckpt: training waited (\d+\.\d\d) s, complete after (\d+\.\d\d) s\.", first
    ).groups()
    assert float(waited) < float(complete)
    assert len(others) == 2


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


def keep_with_link_and_resume(model: Path, directory: Path, world_size: int) -> Notes:
    """`save_top_k=1`, `save_last="link"`, the first save held back; then one more step from "last"."""
    notes = fit_and_keep(model, directory, world_size, {}, {"save_top_k": 1, "save_last": "link"}, holds=True)
    keeper = ModelCheckpoint(directory, "{step}", every_n_train_steps=1, save_top_k=1, save_last="link")
    trainer = make_trainer({}, world_size, max_steps=4, enable_checkpointing=True, callbacks=[keeper])
    trainer.fit(make_module(model), SequenceDataModule(frozen_sequences(16), 4), ckpt_path="last")
    trainer.strategy.barrier()
    return {**notes, "resumed": look(directory), "global_step": trainer.global_step, "from": trainer.ckpt_path}


def test_last_is_a_link_to_what_is_complete(worker_pool, qwen3_dir, tmp_path):
    """Retention and links wait for the checkpoint that they are about.

    Fails with Lightning's own link (which points to nothing while the first checkpoint is written) and when the
    checkpoint before is removed as soon as it is asked for: the link would point to nothing until it is switched.
    """
    for mine in worker_pool.run(
        keep_with_link_and_resume, qwen3_dir, tmp_path, 2, world_size=2, init_process_group=False
    ):
        assert mine["meanwhile"] == {
            "complete": [],
            "others": [".step=1.ckpt.lightning-megatron-rl-incomplete", "step=1.ckpt"],
            "links": {},
        }
        assert mine["end"] == {
            "complete": ["last.ckpt", "step=3.ckpt"],
            "others": [],
            "links": {"last.ckpt": "step=3.ckpt"},
        }
        assert mine["save_last"] == "link", "the callback is as it was"
        assert mine["from"] == str(tmp_path / "last.ckpt")
        assert mine["global_step"] == 4
        assert mine["resumed"]["links"]["last.ckpt"] == "step=4.ckpt"


class ManySaves(pl.Callback):
    """Saves three times after one step, and changes a weight after the first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        trainer.save_checkpoint(self.directory / "a.ckpt")
        with torch.no_grad():
            next(module.parameters()).data.mul_(0.5)  # as a callback would that exchanges weights for averaged ones
        trainer.save_checkpoint(self.directory / "b.ckpt")
        trainer.save_checkpoint(self.directory / "c.ckpt")
        trainer.save_checkpoint(self.directory / "weights.ckpt", weights_only=True)


def save_many_times(model: Path, directory: Path, world_size: int) -> None:
    trainer = make_trainer({}, world_size, max_steps=1, callbacks=[ManySaves(directory)])
    trainer.fit(make_module(model), SequenceDataModule(frozen_sequences(4), 4))


def test_saves_of_one_moment_share_their_files(worker_pool, qwen3_dir, tmp_path):
    """As the best and the last checkpoint do; not if a weight has changed in between, and not with fewer tensors."""
    worker_pool.run(save_many_times, qwen3_dir, tmp_path, 1, world_size=1, init_process_group=False)
    a, b, c, weights = (tmp_path / f"{name}.ckpt" / "sharded" / "__0_0.distcp" for name in ("a", "b", "c", "weights"))
    assert b.samefile(c)
    assert not a.samefile(b)
    assert shards(a.parents[1]) != shards(b.parents[1])
    assert weights.stat().st_size < b.stat().st_size
    manifests = [read_manifest(path.parents[1]) for path in (b, c, weights)]
    assert manifests[0]["files"].keys() == manifests[1]["files"].keys()
    assert [manifest["has_optimizer"] for manifest in manifests] == [True, True, False]


class FillsTheDisk(pl.Callback):
    """From the end of one step on, rank 1 can write files of at most 100 bytes; what was saved before is complete."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.soft, self.hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.reached = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.reached = trainer.global_step
        if trainer.global_step != self.step:
            return
        trainer.strategy.checkpoints.keeper.finish()
        if trainer.global_rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, self.hard))


def run_until_the_disk_is_full(model: Path, directory: Path, world_size: int, steps: int) -> Notes:
    full = FillsTheDisk(2)
    keeper = ModelCheckpoint(directory, "{step}", every_n_train_steps=1, save_top_k=1, save_last="link")
    trainer = make_trainer(
        {"timeout_s": 30.0}, world_size, max_steps=steps, enable_checkpointing=True, callbacks=[full, keeper]
    )
    try:
        trainer.fit(make_module(model), SequenceDataModule(frozen_sequences(4 * steps), 4))
    except OSError as error:
        trainer.strategy.barrier()
        return {"error": str(error), "reached": full.reached, "there": look(directory)}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (full.soft, full.hard))
    raise AssertionError("the failed save was not told")


@pytest.mark.parametrize(("steps", "reached"), [(5, 3), (2, 2)], ids=["next_save", "end_of_the_run"])
def test_a_write_that_fails_is_told_on_every_rank(worker_pool, qwen3_dir, tmp_path, steps, reached):
    """By the next save, or by the end; the checkpoint before stays, with its link, and nothing half.

    Fails if what was to be removed is removed all the same.
    """
    arguments = (qwen3_dir, tmp_path, 2, steps)
    for mine in worker_pool.run(
        run_until_the_disk_is_full, *arguments, world_size=2, init_process_group=False, timeout=120.0
    ):
        assert f"rank 1 cannot write the checkpoint {tmp_path / 'step=2.ckpt'}" in mine["error"]
        assert mine["reached"] == reached
        assert mine["there"] == {
            "complete": ["last.ckpt", "step=1.ckpt"],
            "others": [],
            "links": {"last.ckpt": "step=1.ckpt"},
        }


def remove_what_is_linked(model: Path, directory: Path, world_size: int) -> list[list[str]]:
    """What is there when the target of a link was removed, and when the link has gone."""
    keeper = ModelCheckpoint(directory, "{step}", every_n_train_steps=1, save_last="link")
    trainer = make_trainer({}, world_size, max_steps=1, enable_checkpointing=True, callbacks=[keeper])
    trainer.fit(make_module(model), SequenceDataModule(frozen_sequences(4), 4))
    strategy: Any = trainer.strategy
    strategy.remove_checkpoint(directory / "step=1.ckpt")
    there = [look(directory)["complete"]]
    strategy.remove_checkpoint(directory / "last.ckpt")
    strategy.checkpoints.keeper._remove_outlived()
    return [*there, look(directory)["complete"]]


def test_what_a_link_points_to_outlives_it(worker_pool, qwen3_dir, tmp_path):
    """Lightning has the old checkpoint removed before it makes the new link."""
    arguments = (remove_what_is_linked, qwen3_dir, tmp_path, 1)
    (found,) = worker_pool.run(*arguments, world_size=1, init_process_group=False)
    assert found == [["last.ckpt", "step=1.ckpt"], []]


class Worsens(pl.Callback):
    """Logs a value that is at its best in the first step."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        module.log("badness", float(trainer.global_step), batch_size=1)


def keep_the_last(model: Path, directory: Path, world_size: int, save_last: Any) -> list[Notes]:
    """`last` after each of: a run whose first step is its best, resumes from its checkpoints, a run of its own."""

    def fit(steps: int, ckpt_path: Any = None, damages: str | None = None) -> Notes:
        keeper = ModelCheckpoint(
            directory, "{step}", monitor="badness", every_n_train_steps=1, save_top_k=1, save_last=save_last
        )
        if damages is not None and trainer_rank() == 0:
            (directory / damages / "trainer.pt").write_bytes(b"")
        strategy = {"fall_back_to_previous": damages is not None}
        callbacks = [Worsens(), keeper]
        trainer = make_trainer(strategy, world_size, max_steps=steps, enable_checkpointing=True, callbacks=callbacks)
        trainer.fit(make_module(model), SequenceDataModule(frozen_sequences(24), 4), ckpt_path=ckpt_path)
        trainer.strategy.barrier()
        found = look(directory)
        steps_of = {name: read_manifest(directory / name)["global_step"] for name in found["complete"]}
        trainer.strategy.barrier()
        return {"steps": steps_of, "links": found["links"], "from": str(trainer.ckpt_path), "others": found["others"]}

    return [
        fit(3),
        fit(2, directory / "step=1.ckpt"),  # goes on where `last` was another one
        fit(4, "last"),
        fit(5, "last", damages="last.ckpt"),
        fit(2),
    ]


def trainer_rank() -> int:
    return int(os.environ["RANK"])


@pytest.mark.parametrize("save_last", by_default(["link"], [True, "link"]))
def test_last_is_the_newest_whatever_the_run_went_on_from(worker_pool, qwen3_dir, tmp_path, save_last):
    """One name, that of the newest checkpoint, which `ckpt_path="last"` takes; a foreign run's is not deleted.

    Fails with Lightning's `last-v1.ckpt`, and with a link to the best checkpoint in place of the newest.
    """
    for runs in worker_pool.run(
        keep_the_last, qwen3_dir, tmp_path, 2, save_last, world_size=2, init_process_group=False
    ):
        for found, last in zip(runs[:4], (3, 2, 4, 5), strict=True):
            assert found["steps"] == {"last.ckpt": last, "step=1.ckpt": 1}, found
            assert found["others"] == []
        assert runs[2]["from"] == str(tmp_path / "last.ckpt")
        *_, other = runs
        aside = [name for name in other["steps"] if name.startswith("run-")]
        assert len(aside) == 1
        assert other["steps"][aside[0]] == 5
        assert other["steps"]["last.ckpt"] == 2


def share_last(model: Path, directory: Path, world_size: int) -> Notes:
    """Two callbacks that save the same steps into one directory, each with `last`."""
    options: dict[str, Any] = {"every_n_train_steps": 1, "save_last": True}
    best = ModelCheckpoint(directory, "best-{step}", monitor="badness", **options)
    newest = ModelCheckpoint(directory, "{step}", **options)
    trainer = make_trainer({}, world_size, max_steps=2, enable_checkpointing=True, callbacks=[Worsens(), best, newest])
    trainer.fit(make_module(model), SequenceDataModule(frozen_sequences(8), 4))
    return look(directory)


def test_two_callbacks_may_have_one_last(worker_pool, qwen3_dir, tmp_path):
    """Fails when the second writes it while the first is still at it: the run ended with its first step."""
    (found,) = worker_pool.run(share_last, qwen3_dir, tmp_path, 1, world_size=1, init_process_group=False)
    assert found["complete"] == ["best-step=1.ckpt", "last.ckpt", "step=2.ckpt"]
    assert found["others"] == []
    assert read_manifest(tmp_path / "last.ckpt")["global_step"] == 2


def save_beside_another_run(model: Path, directory: Path, world_size: int) -> str:
    """The error of a run into a directory that another process has locked, as one does that saves there."""
    keeper = ModelCheckpoint(directory, every_n_train_steps=1)
    trainer = make_trainer({}, world_size, max_steps=1, enable_checkpointing=True, callbacks=[keeper])
    trainer.fit(make_module(model), SequenceDataModule(frozen_sequences(4), 4))  # and gives it back
    other = make_trainer({}, world_size, max_steps=1, enable_checkpointing=True, callbacks=[ModelCheckpoint(directory)])
    with closing(Lock(directory)), pytest.raises(RuntimeError) as error:
        other.fit(make_module(model), SequenceDataModule(frozen_sequences(4), 4))
    return str(error.value)


def test_two_runs_at_once_in_one_directory_are_noticed(worker_pool, qwen3_dir, tmp_path):
    arguments = (save_beside_another_run, qwen3_dir, tmp_path, 1)
    (message,) = worker_pool.run(*arguments, world_size=1, init_process_group=False)
    assert f"another run is saving checkpoints into {tmp_path}" in message
    assert "dirpath" in message
