"""Checkpoints: a resumed run is the run, in any layout; nothing half-written is ever taken for one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron_rl.checkpoints.manifest import read_manifest
from lightning_megatron_rl.models.layers.moe import MoESettings
from tests.distributed import WorkerError
from tests.modules.test_lora import PositionedDataModule
from tests.selection import by_default
from tests.strategy.test_megatron import LAYOUTS, RELATIVE, assert_same_run
from tests.tiny_models import save_tiny_model
from tests.training import Run, fit_arithmetic, fit_sft, frozen_sequences

SAVED_AT, STEPS = 3, 7  # an epoch has 5 steps: the resumed run starts in the middle of one and ends in the next


EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "ep2_dp4": (4, {"expert_model_parallel_size": 2}),  # each expert on two replicas, which share its optimizer state
    "tp2_sp_etp1": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}),
}


def job(pool: Any, layout: str, model: Path, **kwargs: Any) -> list[Run]:
    world_size, strategy = {**LAYOUTS, **EXPERT_LAYOUTS}[layout]
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
    assert timeless(resumed) == timeless(whole)[SAVED_AT:]
    for name, weight in whole.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


@pytest.mark.parametrize("layout", by_default(["tp2_sp", "pp2"], ["tp2_sp", "pp2", "pp2_vpp2_cp2"]))
def test_resume_in_another_layout(worker_pool, qwen3_dir, directory, whole, layout):
    resumed = job(worker_pool, layout, qwen3_dir, max_steps=STEPS, ckpt_path=str(directory / f"step={SAVED_AT}.ckpt"))[
        0
    ]
    assert_same_run(resumed, Run(whole.steps[SAVED_AT:], whole.weights))


def timeless(run: Run) -> list[dict[str, float]]:
    """What was logged but for times."""
    return [{name: step[name] for name in step if not name.startswith(("time/", "perf/"))} for step in run.steps]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "saved", "others"),
    [
        # without its own balance loss, which depends on how a layout divides the batch into micro-batches
        ("qwen3_moe_dir", "ep2_dp4", ["one", "tp2_sp", "tp2_sp_etp1"]),
        pytest.param("deepseek_dir", "pp2", ["tp2_sp", "ep2"], marks=pytest.mark.slow),
    ],
    ids=["qwen3_moe", "deepseek_v3"],
)
def test_experts_resume_in_any_layout(worker_pool, request, tmp_path, family, saved, others):
    """Split or whole, with the state of their optimizer; and expert biases, which no optimizer knows."""
    model = request.getfixturevalue(family)
    has_bias = family == "deepseek_dir"
    moe = MoESettings(aux_loss_coeff=0.0, z_loss_coeff=0.1, expert_bias_update_rate=0.01 if has_bias else 0.0)
    options = {"max_steps": 2, "module": {"moe": moe}}
    whole = job(worker_pool, saved, model, checkpoints=tmp_path, **options)[0]
    options["ckpt_path"] = str(tmp_path / "step=1.ckpt")
    same = job(worker_pool, saved, model, **options)[0]
    assert timeless(same) == timeless(whole)[1:]
    for name, weight in whole.weights.items():
        assert torch.equal(same.weights[name], weight), name
    for layout in others:
        assert_same_run(job(worker_pool, layout, model, **options)[0], Run(whole.steps[1:], whole.weights))


def test_checkpoint_directory_is_complete_and_described(directory, whole):
    path = directory / f"step={SAVED_AT}.ckpt"
    layout = read_manifest(path)
    assert layout["global_step"] == SAVED_AT
    assert layout["has_optimizer"]
    assert layout["world_size"] == 2
    assert sorted(entry.name for entry in path.iterdir()) == ["hf", "manifest.json", "rng", "sharded", "trainer.pt"]
    assert not [entry for entry in directory.iterdir() if entry.name.startswith(".")], "half a checkpoint was left"


def test_fit_refuses_a_checkpoint_without_optimizer_state(worker_pool, qwen3_dir, tmp_path):
    """It would start from zero moments and full-precision copies of other weights, silently."""
    job(worker_pool, "dp2", qwen3_dir, max_steps=1, checkpoints=tmp_path, save_weights_only=True)
    with pytest.raises(WorkerError, match="holds weights only"):
        job(worker_pool, "dp2", qwen3_dir, max_steps=2, ckpt_path=str(tmp_path / "step=1.ckpt"))


def test_resume_with_the_other_kind_of_optimizer(worker_pool, qwen3_dir, directory, whole):
    """Without a distributed optimizer what was saved with one."""
    path = str(directory / f"step={SAVED_AT}.ckpt")
    resumed = job(worker_pool, "dp2_plain", qwen3_dir, max_steps=STEPS, ckpt_path=path)[0]
    assert_same_run(resumed, Run(whole.steps[SAVED_AT:], whole.weights))


def test_checkpoint_of_another_model_is_refused(worker_pool, tied_dir, directory, whole):
    with pytest.raises(WorkerError, match=r"is of another model: model_type qwen3 in the checkpoint, qwen2 in "):
        job(worker_pool, "dp2", tied_dir, max_steps=STEPS, ckpt_path=str(directory / f"step={SAVED_AT}.ckpt"))


def test_checkpoint_that_has_more_than_the_model_is_refused(worker_pool, directory, whole, tmp_path):
    """Qwen3 normalises queries and keys, Llama of the same shapes does not."""
    llama = save_tiny_model(tmp_path / "llama", "llama")
    with pytest.raises(WorkerError, match=r"is of another model: model_type qwen3 in the checkpoint, llama in "):
        job(worker_pool, "dp2", llama, max_steps=STEPS, ckpt_path=str(directory / f"step={SAVED_AT}.ckpt"))


def test_checkpoint_of_another_vocabulary_is_refused(worker_pool, tied_dir, odd_vocabulary, tmp_path):
    """Fails if Megatron's own comparison is trusted, which leaves vocabularies out: one row would stay as it was."""
    single = {"world_size": 1, "init_process_group": False}
    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1)
    saving = {"callbacks": [keeper], "trainer": {"enable_checkpointing": True}, "steps": 1}
    worker_pool.run(fit_sft, tied_dir, {}, 1, **saving, **single)
    with pytest.raises(WorkerError, match=r"is of another model: vocab_size 128 in the checkpoint, 127 in "):
        worker_pool.run(fit_sft, odd_vocabulary, {}, 1, ckpt_path=str(tmp_path / "step=1.ckpt"), **single)


def test_padded_vocabulary_resumes_in_another_layout(worker_pool, odd_vocabulary, tmp_path):
    """127 tokens are 128 rows on two ranks, and 127 on one."""
    sequences = [replace(s, token_ids=s.token_ids.clamp(max=126)) for s in frozen_sequences(8)]
    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    saving = {"callbacks": [keeper], "trainer": {"enable_checkpointing": True}}
    options: dict[str, Any] = {"data": PositionedDataModule(sequences, 4), "init_process_group": False}
    world, strategy = LAYOUTS["tp2_sp"]
    whole = worker_pool.run(fit_sft, odd_vocabulary, strategy, world, world_size=world, **saving, **options)[0]
    options |= {"ckpt_path": str(tmp_path / "step=1.ckpt"), "world_size": 1}
    resumed = worker_pool.run(fit_sft, odd_vocabulary, {}, 1, **options)[0]
    assert len(resumed.steps) == 1
    for name, weight in whole.weights.items():
        assert (resumed.weights[name] - weight).norm() / weight.norm() <= RELATIVE, name


def test_path_that_is_no_checkpoint_is_refused(worker_pool, qwen3_dir, tmp_path):
    with pytest.raises(WorkerError, match="is not a checkpoint of this strategy, or one that was never finished"):
        job(worker_pool, "dp2", qwen3_dir, max_steps=1, ckpt_path=str(qwen3_dir))
    with pytest.raises(WorkerError, match="does not exist"):
        job(worker_pool, "dp2", qwen3_dir, max_steps=1, ckpt_path=str(tmp_path / "nothing"))


def test_unwritable_directory_is_named(worker_pool, qwen3_dir):
    with pytest.raises(WorkerError, match=r"ModelCheckpoint\(dirpath\)=.*/proc/checkpoints.* cannot be written"):
        job(worker_pool, "dp2", qwen3_dir, max_steps=1, checkpoints=Path("/proc/checkpoints"))


def test_layout_files_survive_a_second_run(worker_pool, qwen3_dir, directory, whole):
    """Saving over a checkpoint of the same name replaces it whole."""
    path = directory / f"step={SAVED_AT}.ckpt"
    before = read_manifest(path)
    (path / "stale").write_text("from the first run")
    job(worker_pool, "dp2", qwen3_dir, max_steps=SAVED_AT, checkpoints=directory, every_n_steps=SAVED_AT)
    assert read_manifest(path) == before


class Spoils(pl.Callback):
    """Puts NaN into a weight after each step, before the checkpoint is saved."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        for name, parameter in pl_module.model.named_parameters():
            if "layers.1.mlp.linear_fc2" in name:
                parameter.data.view(-1)[7] = torch.nan


def test_weights_that_are_no_numbers_are_not_loaded(worker_pool, qwen3_dir, tmp_path):
    """Every rank raises: neither a resumed run nor a new one begins with NaN. Fails without `_check_finite`."""
    job(worker_pool, "dp2", qwen3_dir, max_steps=1, checkpoints=tmp_path, callbacks=[Spoils()])
    path = str(tmp_path / "step=1.ckpt")
    for options in ({"ckpt_path": path}, {"module": {"init_from": path}}):
        with pytest.raises(WorkerError) as told:
            job(worker_pool, "tp2_sp", qwen3_dir, max_steps=2, **options)
        message = f"checkpoint {path}: 1 loaded weights are not finite: "
        assert [kind for kind, _ in told.value.raised.values()] == ["ValueError"] * 2
        for _, text in told.value.raised.values():
            assert message in text
            assert "decoder.layers.1.mlp.linear_fc2.weight" in text
