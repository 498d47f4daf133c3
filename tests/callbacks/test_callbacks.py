"""Side effects: weights to the engine, models and samples to disk."""

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_megatron_rl.callbacks.rollout_samples import RolloutSamples
from lightning_megatron_rl.callbacks.weight_sync import WeightSync
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


def test_samples_of_all_replicas_are_kept(worker_pool, qwen3_dir, tmp_path):
    run(worker_pool, qwen3_dir, "dp2", steps=2, callbacks=[RolloutSamples(dirpath=str(tmp_path / "new" / "samples"))])
    files = sorted((tmp_path / "new" / "samples").glob("rollouts-*.jsonl"))
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
