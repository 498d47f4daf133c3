"""Side effects: weights to the engine, models and samples to disk."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_megatron_rl.callbacks.hf_export import HFExport
from lightning_megatron_rl.callbacks.rollout_samples import RolloutSamples
from lightning_megatron_rl.callbacks.weight_sync import WeightSync
from tests.distributed import WorkerError
from tests.modules.runs import NUM_GENERATIONS, fit_grpo
from tests.strategy.test_megatron import LAYOUTS


class UsersSync(WeightSync):
    """A user's own version of the callback."""


class ListCallbacks(Callback):
    """Writes down which callbacks the Trainer ended up with."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.path.write_text(json.dumps([type(callback).__name__ for callback in trainer.callbacks]))


class BreakExport(Callback):
    """Changes the weights between the probe's scores and the export, as a wrong conversion would."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        original = pl_module.save_pretrained

        def save(directory: Path) -> None:
            with torch.no_grad():
                next(iter(pl_module.model.parameters())).mul_(1.5)
            original(directory)

        pl_module.save_pretrained = save


def run(pool: Any, model: Path, layout: str = "single", **kwargs: Any) -> Any:
    world_size, strategy = {**LAYOUTS, "single": (1, {})}[layout]
    return pool.run(fit_grpo, model, strategy, world_size, world_size=world_size, init_process_group=False, **kwargs)


def test_weight_sync_is_added_only_when_missing(worker_pool, qwen3_dir, tmp_path):
    run(worker_pool, qwen3_dir, steps=1, callbacks=[ListCallbacks(tmp_path / "own")])
    assert json.loads((tmp_path / "own").read_text()).count("WeightSync") == 1
    run(worker_pool, qwen3_dir, steps=1, callbacks=[ListCallbacks(tmp_path / "users"), UsersSync()])
    names = json.loads((tmp_path / "users").read_text())
    assert "UsersSync" in names
    assert "WeightSync" not in names


def test_export_loads_in_transformers_with_the_trained_weights(worker_pool, qwen3_dir, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    callbacks = [HFExport(dirpath=str(tmp_path), every_n_steps=1)]
    result = run(worker_pool, qwen3_dir, "tp2_sp", steps=2, callbacks=callbacks)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step-000001", "step-000002"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "last", dtype=torch.float32)
    AutoTokenizer.from_pretrained(tmp_path / "last")
    GenerationConfig.from_pretrained(tmp_path / "last")
    state = model.state_dict()
    for name, weight in result.weights.items():
        assert torch.equal(state[name], weight), name


def test_wrong_export_is_not_reported_as_done(worker_pool, qwen3_dir, tmp_path):
    with pytest.raises(WorkerError, match="is not the trained model"):
        run(worker_pool, qwen3_dir, steps=1, callbacks=[BreakExport(), HFExport(dirpath=str(tmp_path))])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.failed"]


def test_export_directory_is_checked_before_training(worker_pool, qwen3_dir, tmp_path):
    (tmp_path / "last").mkdir()
    with pytest.raises(WorkerError, match="exists already"):
        run(worker_pool, qwen3_dir, callbacks=[HFExport(dirpath=str(tmp_path))])
    with pytest.raises(WorkerError, match=r"HFExport\(dirpath\)='/proc/export' cannot be written"):
        run(worker_pool, qwen3_dir, callbacks=[HFExport(dirpath="/proc/export")])


def test_samples_of_all_replicas_are_kept(worker_pool, qwen3_dir, tmp_path):
    run(worker_pool, qwen3_dir, "dp2", steps=2, callbacks=[RolloutSamples(dirpath=str(tmp_path))])
    files = sorted(tmp_path.glob("rollouts-*.jsonl"))
    assert [file.name for file in files] == ["rollouts-dp0.jsonl", "rollouts-dp1.jsonl"]
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(records) == 2 * 4 * NUM_GENERATIONS
    assert {record["step"] for record in records} == {1, 2}
    assert {record["index"] for record in records} == set(range(8))
    assert all(set(record["rewards"]) == {"parity", "length"} for record in records)


@pytest.mark.parametrize("options", [{"num_samples": -1}, {"every_n_steps": 0}])
def test_rollout_samples_settings_are_checked(options):
    with pytest.raises(ValueError, match="must be"):
        RolloutSamples(**options)
