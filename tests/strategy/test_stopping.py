"""Signals that stop a run: with a checkpoint, before the same batch on every rank, with the documented code."""

import os
import shutil
import signal
import stat
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_megatron_rl.checkpoints.format import PendingCheckpoint
from lightning_megatron_rl.checkpoints.keeping import stop_checkpoint
from lightning_megatron_rl.checkpoints.manifest import FileRecord, read_manifest, write_manifest
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.strategy.checks import check_callbacks
from lightning_megatron_rl.strategy.stopping import _link_for_requeue
from lightning_megatron_rl.strategy.termination import StopNotice, exit_code
from tests.drills.job import IsTold, Job, history, train
from tests.notices import collected
from tests.selection import by_default
from tests.training import SequenceDataModule, fit_sft, frozen_sequences, make_trainer

ASKED = {"save_on_interrupt": True}


@pytest.mark.parametrize("number", by_default([signal.SIGINT], [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]))
def test_each_signal_saves_and_has_its_exit_code(worker_pool, qwen3_dir, tmp_path, number):
    job = Job(qwen3_dir, tmp_path, "sft", ASKED, saves_every=100, callbacks=[IsTold(0, number)])
    told = worker_pool.run(train, job, 1, world_size=1, init_process_group=False)
    assert told == [{"code": exit_code(number), "global_step": 1}]
    assert (tmp_path / "checkpoints" / "last-stopped.ckpt").is_dir()


class IsToldWhileValidating(pl.Callback):
    """Sends SIGTERM to this process in its first validation."""

    def on_validation_batch_start(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_in_a_validation_is_answered_at_its_end(worker_pool, qwen3_dir, tmp_path):
    """The sanity check is one: there is nothing to save before the first batch. Hangs with Lightning's own handler."""
    job = Job(qwen3_dir, tmp_path, "sft", saves_every=100, callbacks=[IsToldWhileValidating()])
    told = worker_pool.run(train, job, 2, world_size=2, init_process_group=False)
    assert told == [{"code": 143, "global_step": 2}, {"code": 0, "global_step": 2}]
    assert list(history(tmp_path, 2)[0]["validation"]) == [2]
    assert (tmp_path / "checkpoints" / "last-stopped.ckpt").is_dir()
    job = Job(qwen3_dir, tmp_path, "sft", resumes=True, saves_every=100)
    job.callbacks = [IsToldWhileValidating()]
    told = worker_pool.run(train, job, 2, world_size=2, init_process_group=False)
    assert [end["global_step"] for end in told] == [4, 4], "the validation was not run again"
    sane = Job(qwen3_dir, tmp_path / "sane", "sft", callbacks=[IsToldWhileValidating()])
    sane.trainer = {"num_sanity_val_steps": 1}
    sane.directory.mkdir()
    told = worker_pool.run(train, sane, 2, world_size=2, init_process_group=False)
    assert told == [{"code": 143, "global_step": 0}, {"code": 0, "global_step": 0}]
    assert not (sane.directory / "checkpoints").exists() or not list((sane.directory / "checkpoints").iterdir())


class ToldWhileLoading(SequenceDataModule):
    """Sends SIGTERM to this process, if it is the first rank, when the data of training are loaded."""

    def train_dataloader(self) -> Any:
        if self.trainer.global_rank == 0 and self.trainer.state.fn == "fit":
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train_dataloader()


def tell_elsewhere(model: Path, world_size: int) -> list[Any]:
    """Exit codes of a run that is told to stop before its first step, and of a validation."""
    codes = []
    for function in ("fit", "validate"):
        callbacks = [IsToldWhileValidating()] if function == "validate" else []
        trainer = make_trainer({"timeout_s": 20.0}, world_size, max_steps=1, callbacks=callbacks)
        try:
            getattr(trainer, function)(SFTModule(str(model)), ToldWhileLoading(frozen_sequences(16), 4))
        except SystemExit as end:
            codes.append(end.code)
    return codes


def test_a_signal_while_data_are_loaded_or_in_an_evaluation(worker_pool, qwen3_dir):
    """Fails with Lightning's own handler: it waits for the other rank while data are loaded, and the code is 0."""
    assert worker_pool.run(tell_elsewhere, qwen3_dir, 2, world_size=2, init_process_group=False) == [[143] * 2, [0] * 2]


class Ends(pl.Callback):
    """Sets `should_stop` on the second rank alone, behind the first batch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1:
            trainer.should_stop = True


def end_on_one_rank(model: Path) -> int:
    """Steps of a fit that one of its ranks wants to end."""
    return len(fit_sft(model, {"timeout_s": 20.0}, 2, steps=3, callbacks=[Ends()]).steps)


def test_one_rank_ends_the_fit_of_all(worker_pool, qwen3_dir):
    assert worker_pool.run(end_on_one_rank, qwen3_dir, world_size=2, init_process_group=False) == [1, 1]


def test_a_run_that_is_at_its_end_ends_by_itself(worker_pool, qwen3_dir, tmp_path):
    job = Job(qwen3_dir, tmp_path, "sft", saves_every=100, callbacks=[IsTold(0)], trainer={"max_steps": 1})
    assert worker_pool.run(train, job, 1, world_size=1, init_process_group=False)[0]["code"] == 0


def stop_without_checkpoints(model: Path) -> tuple[Any, list[str]]:
    """Exit code and warnings of a run without a ModelCheckpoint; it gives the signals back."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    code: Any = None
    with collected() as caught:
        try:
            fit_sft(model, {}, 1, callbacks=[IsTold(0)])
        except SystemExit as end:
            code = end.code
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    return code, list(caught)


def test_without_a_model_checkpoint_the_run_says_that_nothing_is_saved(worker_pool, qwen3_dir):
    code, messages = worker_pool.run(stop_without_checkpoints, qwen3_dir, world_size=1, init_process_group=False)[0]
    assert code == 143
    assert any("stops without a checkpoint" in message for message in messages)


class Meddles(pl.Callback):
    """At the start of the third step lets something come between a stop's checkpoint and the one that follows it."""

    def __init__(self, stopped: Path, how: str) -> None:
        self.stopped, self.how = stopped, how

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != 2:
            return
        if self.how == "same step":
            trainer.save_checkpoint(self.stopped.with_name("again.ckpt"))
        elif self.how == "replaced" and trainer.is_global_zero:
            manifest = read_manifest(self.stopped)
            write_manifest(self.stopped, {"global_step": 0}, {"x": FileRecord(**manifest["files"]["trainer.pt"])})


def go_on(
    job: Job, world_size: int, fails: str, *, every: int = 3, steps: int = 5, **keeper: Any
) -> tuple[Any, list[str]]:
    """Train with a checkpoint of the third step, until the fifth; `fails` is one that cannot be written."""
    write = PendingCheckpoint.write

    def write_or_fail(checkpoint: PendingCheckpoint, group: Any = None) -> None:
        if checkpoint.path.name == fails:
            checkpoint.abandon()
            raise OSError("no room")
        write(checkpoint, group)

    keeps = ModelCheckpoint(job.directory / "checkpoints", "{step}", every_n_train_steps=every, **keeper)
    job.trainer = {"max_steps": steps, "callbacks": [keeps, *job.callbacks], "limit_val_batches": 0}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(PendingCheckpoint, "write", write_or_fail)
        try:
            code = train(job, world_size)["code"]
        except OSError as error:
            code = str(error)
    return code, [str(warning.message) for warning in caught if "make way" in str(warning.message)]


@pytest.fixture(scope="module")
def stopped(worker_pool, qwen3_dir, tmp_path_factory) -> Path:
    """A run of two ranks that was stopped after two steps, with SLURM's link to its checkpoint."""
    directory = tmp_path_factory.mktemp("stopped")
    job = Job(qwen3_dir, directory, "sft", callbacks=[IsTold(1)])
    told = worker_pool.run(go_on, job, 2, "", world_size=2, init_process_group=False)
    assert told == [(143, []), (0, [])]
    _link_for_requeue(directory, directory / "checkpoints" / "last-stopped.ckpt")
    return directory


STOP, NEXT = "last-stopped.ckpt", "step=3.ckpt"


@pytest.mark.parametrize("later", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("save_last", [None, True, "link"])
def test_the_next_checkpoint_takes_the_place_of_the_stops(worker_pool, qwen3_dir, tmp_path, stopped, save_last, later):
    """Otherwise `last`, or a requeued job, would go back to it however far this run went."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True, symlinks=True)
    job = Job(qwen3_dir, tmp_path, "sft", {"async_save": later}, resumes=True)
    ended = worker_pool.run(go_on, job, 2, "", save_last=save_last, world_size=2, init_process_group=False)
    assert [code for code, _ in ended] == [0, 0]
    directory = tmp_path / "checkpoints"
    assert {path.name for path in directory.iterdir()} == {NEXT, STOP, *(["last.ckpt"] if save_last else [])}
    assert (directory / STOP).readlink() == Path("last.ckpt" if save_last else NEXT)
    assert read_manifest(directory / STOP)["global_step"] == 3
    assert (tmp_path / "hpc_ckpt_1.ckpt").resolve() == (directory / STOP).resolve()


def test_it_follows_the_run_and_gives_way_to_the_next_stop(worker_pool, qwen3_dir, tmp_path, stopped):
    """One checkpoint is kept: the one before goes when the name stands for the next one."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True, symlinks=True)
    directory, keep = tmp_path / "checkpoints", {"every": 1, "save_top_k": 1}
    job = Job(qwen3_dir, tmp_path, "sft", resumes=True)
    assert worker_pool.run(go_on, job, 2, "", **keep, world_size=2, init_process_group=False) == [(0, [])] * 2
    assert {path.name for path in directory.iterdir()} == {"step=5.ckpt", STOP}
    assert (directory / STOP).readlink() == Path("step=5.ckpt")
    job = Job(qwen3_dir, tmp_path, "sft", resumes=True, callbacks=[IsTold(6)])
    told = worker_pool.run(go_on, job, 2, "", steps=9, world_size=2, init_process_group=False)
    assert [code for code, _ in told] == [143, 0]
    assert not (directory / STOP).is_symlink()
    assert read_manifest(directory / STOP)["global_step"] == 7


@pytest.mark.parametrize(
    ("how", "resumes", "keeper", "fails", "left"),
    [
        ("not resumed from it", False, {}, "", {STOP, NEXT}),
        ("weights only", True, {"save_weights_only": True}, "", {STOP, NEXT}),
        ("replaced", True, {}, "", {STOP, NEXT}),
        ("same step", True, {}, NEXT, {STOP, "again.ckpt"}),
        ("not complete", True, {"save_last": True}, "last.ckpt", {STOP, NEXT}),
    ],
)
def test_nothing_else_ends_the_checkpoint_of_a_stop(
    worker_pool, qwen3_dir, tmp_path, stopped, how, resumes, keeper, fails, left
):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True, symlinks=True)
    job = Job(qwen3_dir, tmp_path, "sft", resumes=resumes, callbacks=[Meddles(tmp_path / "checkpoints" / STOP, how)])
    ended = worker_pool.run(go_on, job, 2, fails, **keeper, world_size=2, init_process_group=False)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == left
    assert (tmp_path / "hpc_ckpt_1.ckpt").resolve() == tmp_path / "checkpoints" / STOP
    assert ended == [("no room" if fails else 0, [])] * 2


class SlurmOfOne(SLURMEnvironment):
    """SLURM's environment for one task, wherever this runs."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """One task on one node."""


def stop_under_slurm(job: Job, scripts: Path, port: int) -> dict[str, Any]:
    """Train as SLURM's only task, with an `scontrol` that notes what it is asked for."""
    variables = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PATH": f"{scripts}:{os.environ['PATH']}",
    }
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        return train(job, 1)
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_slurm_requeues_the_job_which_finds_its_checkpoint(worker_pool, qwen3_dir, tmp_path):
    """SIGUSR1, `scontrol requeue`, and a second start without `ckpt_path` goes on."""
    from tests.distributed import free_port

    scripts = tmp_path / "bin"
    scripts.mkdir()
    scontrol = scripts / "scontrol"
    scontrol.write_text(f'#!/bin/sh\nls {tmp_path}/checkpoints >> {tmp_path}/asked\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    strategy = {"cluster_environment": SlurmOfOne(auto_requeue=True)}
    first = Job(qwen3_dir, tmp_path, "sft", strategy, saves_every=100, callbacks=[IsTold(1, signal.SIGUSR1)])
    told = worker_pool.run(stop_under_slurm, first, scripts, free_port(), world_size=1, init_process_group=False)
    assert told == [{"code": 138, "global_step": 2}]
    assert (tmp_path / "asked").read_text().splitlines() == ["last-stopped.ckpt", "requeue 4711"]
    assert (tmp_path / "hpc_ckpt_1.ckpt").resolve() == tmp_path / "checkpoints" / "last-stopped.ckpt"
    second = Job(qwen3_dir, tmp_path, "sft", strategy, saves_every=100)
    ended = worker_pool.run(stop_under_slurm, second, scripts, free_port(), world_size=1, init_process_group=False)
    assert ended[0]["code"] == 0
    assert list(history(tmp_path, 1)[0]["rows"]) == list(range(7)), "it began anew"


def test_a_second_interrupt_does_not_wait():
    notice = StopNotice([signal.SIGINT])
    notice._receive(signal.SIGINT, None)
    notice._receive(signal.SIGINT, None)  # at once: the launcher has passed the same Ctrl-C on
    assert notice.received == signal.SIGINT
    notice._when -= 2
    with pytest.raises(KeyboardInterrupt):
        notice._receive(signal.SIGINT, None)


def test_place_of_the_checkpoint(tmp_path):
    keeper = ModelCheckpoint(tmp_path)
    trainer = pl.Trainer(callbacks=[keeper], logger=False, accelerator="cpu")
    assert stop_checkpoint(trainer) == tmp_path / "last-stopped.ckpt"
    assert keeper._find_last_checkpoints(trainer) == set()
    (tmp_path / "last-stopped.ckpt").mkdir()
    assert keeper._find_last_checkpoints(trainer) == {str(tmp_path / "last-stopped.ckpt")}, "ckpt_path='last'"
    assert stop_checkpoint(pl.Trainer(enable_checkpointing=False, logger=False, accelerator="cpu")) is None


@pytest.mark.parametrize("callback", [ModelCheckpoint(save_on_exception=True), OnExceptionCheckpoint(".")])
def test_checkpoints_of_exceptions_are_refused(callback):
    with pytest.raises(ValueError, match=r"in the middle of a batch.*every_n_train_steps"):
        check_callbacks([callback])
