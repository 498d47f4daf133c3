"""Signals that stop a run: with a checkpoint, before the same batch on every rank, with the documented code."""

import os
import signal
import stat
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_megatron_rl.strategy.checks import check_checkpoint_callbacks
from lightning_megatron_rl.strategy.stopping import stop_checkpoint
from lightning_megatron_rl.strategy.termination import StopNotice, exit_code
from tests.drills.job import IsTold, Job, history, train
from tests.selection import by_default
from tests.training import fit_sft

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


def test_a_run_that_is_at_its_end_ends_by_itself(worker_pool, qwen3_dir, tmp_path):
    job = Job(qwen3_dir, tmp_path, "sft", saves_every=100, callbacks=[IsTold(0)], trainer={"max_steps": 1})
    assert worker_pool.run(train, job, 1, world_size=1, init_process_group=False)[0]["code"] == 0


def stop_without_checkpoints(model: Path) -> tuple[Any, list[str]]:
    """Exit code and warnings of a run without a ModelCheckpoint; it gives the signals back."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    code: Any = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit_sft(model, {}, 1, callbacks=[IsTold(0)])
        except SystemExit as end:
            code = end.code
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    return code, [str(warning.message) for warning in caught]


def test_without_a_model_checkpoint_the_run_says_that_nothing_is_saved(worker_pool, qwen3_dir):
    code, messages = worker_pool.run(stop_without_checkpoints, qwen3_dir, world_size=1, init_process_group=False)[0]
    assert code == 143
    assert any("stops without a checkpoint" in message for message in messages)


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
        check_checkpoint_callbacks([callback])
