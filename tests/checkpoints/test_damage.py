"""Runs that meet a damaged checkpoint or a full disk: refused by name, or on from the previous checkpoint."""

import resource
import shutil
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron_rl.checkpoints.manifest import check_files, read_manifest
from tests.drills.job import STEPS, Job, differences, history, make_data, make_module, train
from tests.notices import collected
from tests.selection import by_default
from tests.training import make_trainer

Damage = Literal["flipped", "truncated", "deleted"]
FILE_LIMIT = 100_000  # bytes; a shard has more, the notes and the log have less


class Breaks(pl.Callback):
    """Ends the run with an error after a step, as anything may."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("broken on purpose")


class FillsTheDisk(pl.Callback):
    """Lets this process write no large file from a step on."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == STEPS - 2:
            strategy: Any = trainer.strategy
            strategy.finish_saving()  # the checkpoint before is still being written
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, hard))


def harm(file: Path, damage: Damage) -> None:
    """Damage a file as a disk or a copy that was cut off does."""
    if damage == "deleted":
        file.unlink()
        return
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 1
    file.unlink()  # it may be the file of another checkpoint as well
    file.write_bytes(content)


def try_to_resume(job: Job) -> str:
    """What a run that goes on from the last checkpoint ends with, and whether it took a step."""
    try:
        train(job, 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it went on"


def run_on_a_full_disk(job: Job) -> str:
    """What a run ends with that can write no large file from some step on."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        return try_to_resume(job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def damage_each_file(job: Job, damage: Damage) -> dict[str, str]:
    """Answers of runs that resume from a checkpoint of which one file is damaged, by the file's name."""
    good = job.directory / "good"
    last = job.directory / "checkpoints" / "last.ckpt"
    shutil.copytree(last, good)
    answers = {}
    for file in sorted(path for path in good.rglob("*") if path.is_file()):
        shutil.rmtree(last)
        shutil.copytree(good, last)
        name = str(file.relative_to(good))
        harm(last / name, damage)
        answers[name] = try_to_resume(job)
    return answers


@pytest.fixture(scope="module")
def broken_off(worker_pool, qwen3_dir, tmp_path_factory) -> Path:
    """A run that ended with an error after five steps, with checkpoints of the second and the fourth."""
    directory = tmp_path_factory.mktemp("broken_off")
    job = Job(qwen3_dir, directory, "sft", callbacks=[Breaks(5)], keeps=-1)
    answer = worker_pool.run(try_to_resume, job, world_size=1, init_process_group=False)
    assert answer == ["RuntimeError: broken on purpose"]
    assert {path.name for path in (directory / "checkpoints").iterdir()} == {"step=2.ckpt", "step=4.ckpt", "last.ckpt"}
    return directory


@pytest.mark.parametrize("damage", by_default(["flipped"], ["flipped", "truncated", "deleted"]))
def test_each_damaged_file_is_refused_by_name(worker_pool, qwen3_dir, tmp_path, broken_off, damage):
    shutil.copytree(broken_off, tmp_path, dirs_exist_ok=True)
    before = history(tmp_path, 1)
    job = Job(qwen3_dir, tmp_path, "sft", resumes=True, keeps=-1)
    (answers,) = worker_pool.run(damage_each_file, job, damage, world_size=1, init_process_group=False)
    assert {"manifest.json", "trainer.pt", "rng/0.pt", "sharded/.metadata"} < answers.keys()
    for name, answer in answers.items():
        assert "last.ckpt" in answer, (name, answer)
        assert Path(name).name in answer, (name, answer)
        assert "Error: " in answer, (name, answer)
    assert history(tmp_path, 1) == before, "a run went on"


def test_the_previous_checkpoint_takes_the_place_of_a_damaged_one(worker_pool, qwen3_dir, tmp_path, broken_off):
    """If the user allows it; the run then ends as the undisturbed one, bitwise."""
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    whole = worker_pool.run(train, Job(qwen3_dir, undisturbed, "sft"), 1, world_size=1, init_process_group=False)
    directory = tmp_path / "resumed"
    shutil.copytree(broken_off, directory)
    harm(next((directory / "checkpoints" / "last.ckpt" / "sharded").glob("*.distcp")), "flipped")
    harm(directory / "checkpoints" / "step=4.ckpt" / "trainer.pt", "truncated")
    job = Job(qwen3_dir, directory, "sft", {"fall_back_to_previous": True}, resumes=True)
    resumed = worker_pool.run(train, job, 1, world_size=1, init_process_group=False)
    assert differences(resumed, whole) == []
    assert differences(history(directory, 1), history(undisturbed, 1)) == []
    rows = (directory / "seen-0.jsonl").read_text().splitlines()
    assert sum('"rows"' in row for row in rows) == 6 + STEPS - 2, "it began again at the second step"


class SavesOthers(pl.Callback):
    """Saves weights alone after each step, and lets the checkpoint of the third say that it is one of adapters."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.strategy.trained_on_top_of = {"rank": 8} if trainer.global_step == 2 else None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.directory / f"best-step={trainer.global_step}.ckpt", weights_only=True)


def fall_back(job: Job, path: str) -> tuple[str, list[str]]:
    """Train for four steps, from a path if it is not ""; what it ended with, and what fell back to what."""
    keeper = ModelCheckpoint(job.directory, "{step}", every_n_train_steps=1, save_top_k=-1, save_last=True)
    trainer = make_trainer(
        {"fall_back_to_previous": True},
        2,
        max_steps=4,
        limit_val_batches=0,
        enable_checkpointing=True,
        callbacks=[keeper, *job.callbacks],
    )
    with collected() as caught:
        try:
            trainer.fit(make_module(job), make_data(job), ckpt_path=path or None)
            end = "it went on"
        except Exception as error:
            end = f"{type(error).__name__}: {error}"
    return end, [message for message in caught if "takes its place" in message]


@pytest.mark.slow
def test_only_what_the_run_can_use_takes_the_place(worker_pool, qwen3_dir, tmp_path):
    """Of a damaged directory, one without a manifest, an empty one; a path that is not there is refused."""
    job = Job(qwen3_dir, tmp_path / "kept", "sft", callbacks=[SavesOthers(tmp_path / "kept")])

    def run(directory: str, path: str) -> list[tuple[str, list[str]]]:
        job.directory = tmp_path / directory
        given = str(job.directory / path) if path else ""
        return worker_pool.run(fall_back, job, given, world_size=2, init_process_group=False)

    assert run("kept", "") == [("it went on", [])] * 2
    job.callbacks = []
    shutil.rmtree(tmp_path / "kept" / "step=4.ckpt")
    for name in ("flipped", "deleted", "empty"):
        shutil.copytree(tmp_path / "kept", tmp_path / name)
        last = tmp_path / name / "last.ckpt"
        harm(
            last / ("trainer.pt" if name == "flipped" else "manifest.json"),
            "deleted" if name == "deleted" else "flipped",
        )
        if name == "empty":
            shutil.rmtree(last)
            last.mkdir()
        (end, (warning,)), other = run(name, "last.ckpt")
        assert end == "it went on"
        assert other == ("it went on", [])
        assert f"{last}/{'trainer.pt has the SHA-256' if name == 'flipped' else 'manifest.json is missing'}" in warning
        assert f"{tmp_path / name}/step=2.ckpt takes its place" in warning
    for end, _ in run("kept", "step=4.ckpt"):
        assert "step=4.ckpt does not exist. In " in end
        assert "last.ckpt" in end
    for name in ("step=1.ckpt", "step=2.ckpt"):
        shutil.rmtree(tmp_path / "kept" / name)
    harm(tmp_path / "kept" / "last.ckpt" / "trainer.pt", "flipped")
    for end, _ in run("kept", "last.ckpt"):
        assert "There is no other undamaged checkpoint in " in end


def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(worker_pool, qwen3_dir, tmp_path):
    """No half directory stays, and a run with room goes on from what is there."""
    job = Job(qwen3_dir, tmp_path, "sft", callbacks=[FillsTheDisk()])
    (answer,) = worker_pool.run(run_on_a_full_disk, job, world_size=1, init_process_group=False)
    assert "cannot write the checkpoint" in answer
    assert "step=6.ckpt" in answer
    assert "Choose a writable" in answer
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {"step=4.ckpt", "last.ckpt"}
    for name in left:
        path = tmp_path / "checkpoints" / name
        check_files(path, read_manifest(path), verify=True)
    (resumed,) = worker_pool.run(
        train, Job(qwen3_dir, tmp_path, "sft", resumes=True), 1, world_size=1, init_process_group=False
    )
    assert resumed["code"] == 0
