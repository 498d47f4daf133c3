"""`HFExport` where something is there already: of the same run, of another one, of one that was killed."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron_rl.callbacks import hf_export
from lightning_megatron_rl.callbacks.hf_export import HFExport
from lightning_megatron_rl.checkpoints import directories
from tests.callbacks.test_hf_export import KeepWarnings, run
from tests.distributed import WorkerError
from tests.modules.runs import fit_grpo
from tests.selection import by_default
from tests.training import SequenceDataModule, frozen_sequences, make_trainer

PREEMPTED = "the run is preempted"


class Preempted(Callback):
    """Ends the run behind a step, before the next checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError(PREEMPTED)


class NoMemory(Callback):
    """The export cannot be proved: Transformers finds no memory for it."""

    def on_fit_start(self, *_: Any) -> None:
        def raises(*_: Any, **__: Any) -> None:
            raise MemoryError

        self.original, hf_export._logprobs = hf_export._logprobs, raises  # type: ignore[assignment]

    def teardown(self, *_: Any, **__: Any) -> None:
        hf_export._logprobs = self.original


class Looks(Callback):
    """Looks at an export as long as the run lasts; it must be there at every moment."""

    def __init__(self, export: Path, told: Path) -> None:
        self.export, self.told = export, told

    def on_fit_start(self, *_: Any) -> None:
        self.done, self.missing = threading.Event(), 0
        self.looking = threading.Thread(target=self.look)
        self.looking.start()

    def look(self) -> None:
        while not self.done.is_set():
            self.missing += not (self.export / "config.json").is_file()

    def teardown(self, *_: Any, **__: Any) -> None:
        self.done.set()
        self.looking.join()
        self.told.write_text(str(self.missing))


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def inode(directory: Path) -> int:
    return directory.stat().st_ino


@pytest.mark.parametrize("layout", by_default(["dp2"], ["single", "dp2"]))
def test_resumed_run_replaces_the_exports_of_steps_that_it_does_again(worker_pool, qwen3_dir, tmp_path, layout):
    """Exports every 3 steps, checkpoints every 2: a run that is killed behind step 3 goes on from step 2."""
    out, checkpoints = tmp_path / "out", tmp_path / "checkpoints"

    def go(**options: Any) -> None:
        saving = ModelCheckpoint(dirpath=checkpoints, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        export = HFExport(str(out), every_n_steps=3, on_error="raise")
        trainer = {"enable_checkpointing": True}
        callbacks = [export, saving, *options.pop("callbacks", [])]
        run(worker_pool, qwen3_dir, layout, steps=4, callbacks=callbacks, trainer=trainer, **options)

    with pytest.raises(WorkerError, match=PREEMPTED):
        go(callbacks=[Preempted(3)])
    assert names(out) == ["step-000003"]
    first = inode(out / "step-000003")
    go(ckpt_path=checkpoints / "step=2.ckpt")
    assert names(out) == ["last", "step-000003"]
    assert inode(out / "step-000003") != first, "written again"
    last = inode(out / "last")
    go(ckpt_path=checkpoints / "step=2.ckpt")  # preempted between its last export and its end
    assert inode(out / "last") != last
    assert names(out) == ["last", "step-000003"]


def never_built(**options: Any) -> Any:
    """A module that fails when its model is built."""
    from lightning_megatron_rl.modules.grpo import GRPOModule

    class NeverBuilt(GRPOModule):
        def configure_model(self) -> None:
            raise AssertionError("the model is built")

    return NeverBuilt(**options)


@pytest.mark.parametrize("layout", by_default(["dp2"], ["single", "dp2"]))
def test_run_that_is_not_resumed_is_refused_before_its_model_is_built(worker_pool, qwen3_dir, tmp_path, layout):
    """Also one with ``ckpt_path="last"`` that finds none; one that finds a checkpoint comes to its model."""
    (tmp_path / "out" / "last").mkdir(parents=True)

    def go(ckpt_path: Any) -> None:
        callbacks = [HFExport(str(tmp_path / "out")), ModelCheckpoint(tmp_path, save_last=True)]
        options = {"make_module": never_built, "trainer": {"enable_checkpointing": True}}
        run(worker_pool, qwen3_dir, layout, callbacks=callbacks, ckpt_path=ckpt_path, **options)

    for ckpt_path in (None, "last"):
        with pytest.raises(WorkerError, match="last exists already, and this run was not resumed"):
            go(ckpt_path)
    (tmp_path / "last.ckpt").mkdir()
    for ckpt_path in (tmp_path / "last.ckpt", "last"):
        # the export is no reason to refuse it; that it is no checkpoint is found before the model is built
        with pytest.raises(WorkerError, match=r"last\.ckpt is not a checkpoint of this strategy"):
            go(ckpt_path)


@pytest.mark.parametrize("name", ["last", "step-000002"])
def test_export_in_the_place_of_the_runs_own_model_is_refused(worker_pool, qwen3_dir, tmp_path, name):
    """Also with `overwrite`: the reference of a resumed run, and what adapters were trained on, would be gone."""
    model = tmp_path / "out" / name
    shutil.copytree(qwen3_dir, model)
    (tmp_path / "there").symlink_to("out")
    export = HFExport(str(tmp_path / "there"), every_n_steps=2, overwrite=True)
    with pytest.raises(WorkerError, match=f"an export would replace .*{name}, the model that this run trains"):
        run(worker_pool, model, callbacks=[export], make_module=never_built, steps=2)
    run(worker_pool, model, callbacks=[HFExport(str(tmp_path / "other"), at_end=False)], steps=1)


def fit_unknowing(model: Path, callbacks: list[Callback], **options: Any) -> None:
    """Fit where nothing tells in `setup` whether the run is resumed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_export, "resumes", lambda trainer: None)
        fit_grpo(model, {}, 1, steps=1, callbacks=callbacks, **options)


def test_what_setup_cannot_tell_is_decided_before_the_first_step(worker_pool, qwen3_dir, tmp_path):
    (tmp_path / "last").mkdir()
    for options, error in (({"make_module": never_built}, "the model is built"), ({}, "this run was not resumed")):
        callbacks = [HFExport(str(tmp_path)), Preempted(1)]
        with pytest.raises(WorkerError, match=error):
            worker_pool.run(fit_unknowing, qwen3_dir, callbacks, world_size=1, init_process_group=False, **options)


def fit_twice(model: Path, out: Path) -> list[int]:
    """Fit one Trainer for a step, and once more for another; the inodes of the export at the end of each."""
    from lightning_megatron_rl.modules.sft import SFTModule

    trainer = make_trainer({}, 1, max_steps=1, callbacks=[HFExport(str(out), verify=False, on_error="raise")])
    inodes = []
    for step in (1, 2):
        trainer.fit_loop.epoch_loop.max_steps = step
        trainer.fit(SFTModule(str(model)), SequenceDataModule(frozen_sequences(8), 4))
        inodes.append(inode(out / "last"))
    return inodes


def fit_fast(model: Path, out: Path) -> None:
    """A batch, as one tries a config, into the directory of a run's export."""
    from lightning_megatron_rl.modules.sft import SFTModule

    export = HFExport(str(out), every_n_steps=1, overwrite=True)
    trainer = make_trainer({}, 1, fast_dev_run=True, callbacks=[export])
    trainer.fit(SFTModule(str(model)), SequenceDataModule(frozen_sequences(8), 4))


def test_fast_dev_run_exports_nothing(worker_pool, qwen3_dir, tmp_path):
    """It would replace the export of a run, or be in its way."""
    last = tmp_path / "last"
    last.mkdir()
    worker_pool.run(fit_fast, qwen3_dir, tmp_path, world_size=1, init_process_group=False)
    assert names(tmp_path) == ["last"]
    assert names(last) == []


def test_second_fit_of_a_trainer_replaces_its_exports(worker_pool, qwen3_dir, tmp_path):
    first, second = worker_pool.run(fit_twice, qwen3_dir, tmp_path, world_size=1, init_process_group=False)[0]
    assert first != second


@pytest.mark.parametrize("layout", by_default(["dp2"], ["single", "dp2"]))
def test_run_that_was_not_resumed_is_refused_before_its_first_step(worker_pool, qwen3_dir, tmp_path, layout):
    """Also for exports of steps; not for those that it does not write."""
    (tmp_path / "step-000002").mkdir()
    message = r"step-000002 exists already, and this run was not resumed.*another dirpath.*remove it.*overwrite=True"
    callbacks: list[Any] = [HFExport(str(tmp_path), every_n_steps=2), Preempted(1)]
    with pytest.raises(WorkerError, match=message):
        run(worker_pool, qwen3_dir, layout, steps=2, callbacks=callbacks)
    assert names(tmp_path) == ["step-000002"]
    (tmp_path / "step-000003").mkdir()
    (tmp_path / "step-final").mkdir()
    callbacks = [HFExport(str(tmp_path), every_n_steps=1, at_end=False)]
    run(worker_pool, qwen3_dir, layout, steps=1, callbacks=callbacks)
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000003", "step-final"]


@pytest.mark.parametrize("layout", by_default(["dp2"], ["single", "dp2"]))
def test_export_that_cannot_be_proved_is_set_aside(worker_pool, qwen3_dir, tmp_path, layout):
    out = tmp_path / "out"
    callbacks = [NoMemory(), HFExport(str(out), every_n_steps=1), KeepWarnings(tmp_path / "told")]
    with pytest.raises(WorkerError, match="RunFailedError"):
        run(worker_pool, qwen3_dir, layout, steps=1, callbacks=callbacks)
    told = json.loads((tmp_path / "told").read_text())["told"]
    assert f"the export {out / 'step-000001.failed'} could not be proved: MemoryError" in told[0]
    assert names(out) == ["last.failed", "step-000001.failed"]


def test_export_that_cannot_be_written_is_named(worker_pool, qwen3_dir, tmp_path):
    (tmp_path / "out").mkdir()
    holder = directories.UnfinishedDirectory(tmp_path / "out" / "last", reserve=False)
    callbacks = [HFExport(str(tmp_path / "out")), KeepWarnings(tmp_path / "told")]
    with pytest.raises(WorkerError, match="RunFailedError"):
        run(worker_pool, qwen3_dir, steps=1, callbacks=callbacks)
    told = json.loads((tmp_path / "told").read_text())["told"]
    assert f"the export {tmp_path / 'out' / 'last'} failed: OSError: another process is writing" in told[0]
    assert names(tmp_path / "out") == [".last.lightning-megatron-rl-incomplete"], "what a living run writes stays"
    holder.abandon()


def test_replaced_in_one_step(worker_pool, qwen3_dir, tmp_path):
    """A run that is killed at any moment leaves the old export or the new one; the next removes what it was writing."""
    out = tmp_path / "out"
    run(worker_pool, qwen3_dir, steps=1, callbacks=[HFExport(str(out), verify=False)])
    first = inode(out / "last")
    for name in (".last.lightning-megatron-rl-incomplete", ".step-000001.lightning-megatron-rl-incomplete"):
        (out / name / ".last.lightning-megatron-rl-partial").mkdir(parents=True)
        (out / name / ".last.lightning-megatron-rl-partial" / "shard-0").touch()
    callbacks = [Looks(out / "last", tmp_path / "missing"), HFExport(str(out), verify=False, overwrite=True)]
    run(worker_pool, qwen3_dir, steps=1, callbacks=callbacks)
    assert (tmp_path / "missing").read_text() == "0"
    assert inode(out / "last") != first
    assert names(out) == ["last"]


def test_killed_between_two_renames(worker_pool, qwen3_dir, tmp_path):
    """On a file system that cannot exchange names: the old export gets its name back."""
    (tmp_path / ".notes.replaced").mkdir()
    for name in ("last", "step-000007"):
        (tmp_path / f".{name}.lightning-megatron-rl-replaced").mkdir()
    with pytest.raises(WorkerError, match="last exists already"):
        run(worker_pool, qwen3_dir, steps=1, callbacks=[HFExport(str(tmp_path))])
    assert names(tmp_path) == [".notes.replaced", "last", "step-000007"]
