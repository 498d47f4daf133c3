"""Checkpoints: a resumed run is the run, in any layout; nothing half-written is ever taken for one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron_rl.strategy import checkpoint as checkpoint_io
from tests.distributed import WorkerError
from tests.strategy.test_megatron import LAYOUTS, assert_same_run
from tests.training import Run, fit_arithmetic

SAVED_AT, STEPS = 3, 7  # an epoch has 5 steps: the resumed run starts in the middle of one and ends in the next


def job(pool: Any, layout: str, model: Path, **kwargs: Any) -> list[Run]:
    world_size, strategy = LAYOUTS[layout]
    return pool.run(
        fit_arithmetic, model, strategy, world_size, world_size=world_size, init_process_group=False, **kwargs
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def whole(worker_pool, qwen3_dir, directory) -> Run:
    """Seven steps without interruption on two data-parallel ranks, with a checkpoint after the third."""
    return job(worker_pool, "dp2", qwen3_dir, max_steps=STEPS, checkpoints=directory, every_n_steps=SAVED_AT)[0]


def test_resume_is_bitwise_in_the_same_layout(worker_pool, qwen3_dir, directory, whole):
    """Weights, optimizer moments, schedule and the order of the shuffled data all continue.

    Fails without the optimizer state in the checkpoint (first resumed step) and without the data cursor.
    """
    resumed = job(worker_pool, "dp2", qwen3_dir, max_steps=STEPS, ckpt_path=str(directory / f"step={SAVED_AT}.ckpt"))[0]
    timeless = [
        [{key: value for key, value in step.items() if not key.startswith(("time/", "perf/"))} for step in run.steps]
        for run in (resumed, whole)
    ]
    assert timeless[0] == timeless[1][SAVED_AT:]
    for name, weight in whole.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


@pytest.mark.parametrize("layout", ["tp2_sp", "pp2", "pp2_vpp2_cp2"])
def test_resume_in_another_layout(worker_pool, qwen3_dir, directory, whole, layout):
    resumed = job(worker_pool, layout, qwen3_dir, max_steps=STEPS, ckpt_path=str(directory / f"step={SAVED_AT}.ckpt"))[
        0
    ]
    assert_same_run(resumed, Run(whole.steps[SAVED_AT:], whole.weights))


def test_checkpoint_directory_is_complete_and_described(directory, whole):
    path = directory / f"step={SAVED_AT}.ckpt"
    layout = checkpoint_io.read_layout(path)
    assert layout["global_step"] == SAVED_AT
    assert layout["has_optimizer"]
    assert layout["world_size"] == 2
    assert sorted(entry.name for entry in path.iterdir()) == ["layout.json", "rng", "sharded", "trainer.pt"]
    assert not [entry for entry in directory.iterdir() if entry.name.startswith(".")], "half a checkpoint was left"


def test_fit_refuses_a_checkpoint_without_optimizer_state(worker_pool, qwen3_dir, tmp_path):
    """It would start from zero moments and full-precision copies of other weights, silently."""
    job(worker_pool, "dp2", qwen3_dir, max_steps=1, checkpoints=tmp_path, save_weights_only=True)
    with pytest.raises(WorkerError, match="holds weights only"):
        job(worker_pool, "dp2", qwen3_dir, max_steps=2, ckpt_path=str(tmp_path / "step=1.ckpt"))


def test_checkpoint_of_another_model_is_refused(worker_pool, tied_dir, directory, whole):
    with pytest.raises(WorkerError, match=r"is of another model: \d+ of \d+ parameters are missing"):
        job(worker_pool, "dp2", tied_dir, max_steps=STEPS, ckpt_path=str(directory / f"step={SAVED_AT}.ckpt"))


def test_path_that_is_no_checkpoint_is_refused(worker_pool, qwen3_dir, tmp_path):
    with pytest.raises(WorkerError, match="is not a checkpoint of this strategy: it has no layout"):
        job(worker_pool, "dp2", qwen3_dir, max_steps=1, ckpt_path=str(qwen3_dir))
    with pytest.raises(WorkerError, match="does not exist"):
        job(worker_pool, "dp2", qwen3_dir, max_steps=1, ckpt_path=str(tmp_path / "nothing"))


def test_unwritable_directory_is_named(worker_pool, qwen3_dir):
    with pytest.raises(WorkerError, match=r"cannot write the checkpoint .*Choose a writable"):
        job(worker_pool, "dp2", qwen3_dir, max_steps=1, checkpoints=Path("/proc/checkpoints"))


def test_newer_format_is_refused(tmp_path):
    (tmp_path / checkpoint_io.LAYOUT_FILE).write_text('{"format_version": 99}')
    with pytest.raises(ValueError, match="upgrade lightning-megatron-rl"):
        checkpoint_io.read_layout(tmp_path)


def test_only_checkpoints_are_deleted(tmp_path):
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(ValueError, match="refusing to delete"):
        checkpoint_io.remove(tmp_path)
    (tmp_path / checkpoint_io.LAYOUT_FILE).write_text("{}")
    checkpoint_io.remove(tmp_path)
    assert not tmp_path.exists()


def test_layout_files_survive_a_second_run(worker_pool, qwen3_dir, directory, whole):
    """Saving over a checkpoint of the same name replaces it whole."""
    path = directory / f"step={SAVED_AT}.ckpt"
    before = checkpoint_io.read_layout(path)
    (path / "stale").write_text("from the first run")
    job(worker_pool, "dp2", qwen3_dir, max_steps=SAVED_AT, checkpoints=directory, every_n_steps=SAVED_AT)
    assert checkpoint_io.read_layout(path) == before
