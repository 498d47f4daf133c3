"""Side effects: weights to the engine, models and samples to disk."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron_rl.callbacks.prediction_files import PredictionFiles, items, plain
from lightning_megatron_rl.callbacks.rollout_samples import RolloutSamples, _show, whole_groups
from lightning_megatron_rl.callbacks.weight_sync import WeightSync
from lightning_megatron_rl.data.loader import EvaluationLoader, GlobalBatches
from lightning_megatron_rl.modules.policy import Scores
from lightning_megatron_rl.sample import Prompt, Sample
from tests.modules.runs import NUM_GENERATIONS, fit_grpo
from tests.notices import collected, informed
from tests.strategy.test_megatron import LAYOUTS
from tests.training import SequenceDataModule, frozen_sequences, make_trainer


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


@pytest.mark.parametrize(
    ("name", "value"), [("num_samples", -1), ("every_n_steps", 0), ("max_samples_per_step", 0), ("max_file_mb", 0)]
)
def test_rollout_samples_settings_are_checked(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        RolloutSamples(**{name: value})


def test_shown_samples_are_whole_and_do_nothing_to_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    _show([Sample(Prompt([1], "0" * 70, answer="2"), [1], [0.5], response="\x1b[2J[i]")], 1)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\\x1b[2J[i]" in shown
    assert shown.count("0") == 70 + len("000")  # and the reward's


@pytest.mark.parametrize(("limit", "kept"), [(None, 8), (8, 8), (7, 4), (4, 4), (3, 3), (1, 1)])
def test_a_limit_keeps_whole_groups(limit, kept):
    """All responses to a prompt or none, so that what is there can be replayed; some of a first group too large."""
    prompts = [Prompt([5], "a", index=0), Prompt([5], "a", index=1)]
    samples = [Sample(prompt, [7], [-0.5]) for prompt in prompts for _ in range(4)]
    assert whole_groups(samples, limit) == samples[:kept]


def sample_twice(model: Path, directory: Path, world_size: int) -> dict[str, Any]:
    """A run with limits, resumed from its first step, and another run; what was said of what was left out."""

    def fit(steps: int, ckpt_path: Path | None = None) -> list[str]:
        keeper = ModelCheckpoint(directory, "{step}", every_n_train_steps=1, save_top_k=-1)
        samples = RolloutSamples(0, dirpath=str(directory / "samples"), max_samples_per_step=5)
        with informed() as said, collected() as lost:
            trainer = {"enable_checkpointing": True}
            fit_grpo(
                model, {}, world_size, steps=steps, callbacks=[keeper, samples], trainer=trainer, ckpt_path=ckpt_path
            )
        assert not any("RolloutSamples" in message for message in lost), "a limit of the user's is no loss"
        return [message for message in said if "RolloutSamples" in message]

    return {"said": fit(2), "resumed": fit(3, directory / "step=1.ckpt"), "other": fit(1)}


def test_samples_are_of_one_run_and_limited(worker_pool, qwen3_dir, tmp_path):
    """A run's steps once each, those that a resumed run does again aside, and another run's in a file of its own.

    Fails when files are appended to whoever has written them.
    """
    arguments = (sample_twice, qwen3_dir, tmp_path, 1)
    (found,) = worker_pool.run(*arguments, world_size=1, init_process_group=False)
    directory = tmp_path / "samples"
    rows = {
        file.name: [json.loads(line) for line in file.read_text().splitlines()] for file in sorted(directory.iterdir())
    }
    steps = {name: sorted({row["step"] for row in lines}) for name, lines in rows.items()}
    assert steps == {
        "evaluation-dp0-2.jsonl": [1],
        "evaluation-dp0.jsonl": [2, 3],
        "rollouts-dp0-2.jsonl": [1],
        "rollouts-dp0-superseded.jsonl": [2],
        "rollouts-dp0.jsonl": [1, 2, 3],
    }
    assert len(rows["rollouts-dp0.jsonl"]) == 3 * NUM_GENERATIONS
    assert len({row["run"] for row in rows["rollouts-dp0.jsonl"]}) == 1
    begins, ends = found["said"]
    assert f"{NUM_GENERATIONS} of {4 * NUM_GENERATIONS} samples of step 1 go into {directory}" in begins
    # two steps of 4 prompts, and a validation of 8 with one response each, of which 5 are kept
    assert f"of {8 * NUM_GENERATIONS + 8} samples of the first replica {2 * NUM_GENERATIONS + 5} were written" in ends
    assert all("max_samples_per_step=5" in message for message in found["said"])


class Uneven(SequenceDataModule):
    """Five sequences in batches of four: with two replicas the last batch of the second one is empty."""

    def predict_dataloader(self) -> Any:
        return EvaluationLoader(self.sequences, GlobalBatches(5, 4, **self.trainer.distributed_sampler_kwargs))


def predict(model: Path, directory: Path, strategy: dict[str, Any], world_size: int) -> list[Any]:
    """What `SFTModule` predicts on this rank, written by two runs."""
    from lightning_megatron_rl.modules.sft import SFTModule
    from lightning_megatron_rl.modules.training import TrainingSettings

    found = []
    for _ in range(2):
        trainer = make_trainer(strategy, world_size, callbacks=[PredictionFiles(str(directory)), PredictionFiles()])
        data = Uneven(frozen_sequences(5), 4)
        found = trainer.predict(SFTModule(str(model), train=TrainingSettings(max_tokens_per_microbatch=64)), data)
        trainer.strategy.barrier()
    return [[row.tolist() for row in scores.logprobs] for scores in found]


def test_predictions_go_into_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert PredictionFiles("~/predictions").dirpath == str(tmp_path / "predictions")


def test_predictions_are_written_by_item(worker_pool, qwen3_dir, tmp_path):
    """Of each replica what `predict` returns there, and nothing for an empty batch; a second run has its own files."""
    world_size, strategy = LAYOUTS["dp2"]
    returned = worker_pool.run(
        predict, qwen3_dir, tmp_path, strategy, world_size, world_size=world_size, init_process_group=False
    )
    names = [f"predictions-dp{replica}{number}.jsonl" for replica in (0, 1) for number in ("-2", "")]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(names)
    for replica, batches in enumerate(returned):
        rows = [json.loads(line) for line in (tmp_path / f"predictions-dp{replica}.jsonl").read_text().splitlines()]
        assert [row["prediction"]["logprobs"] for row in rows] == [logprobs for batch in batches for logprobs in batch]
        assert [(row["batch"], row["item"]) for row in rows] == [(0, 0), (0, 1), (1, 0)][: 3 - replica]
        given = frozen_sequences(5)[replica::2]
        assert [row["input"]["token_ids"] for row in rows] == [sequence.token_ids.tolist() for sequence in given]
        assert rows[0]["dataset"] == 0


def test_predictions_of_any_kind_have_items():
    """A row of a tensor, an element of a list, one of each list of a dataclass; anything else is one."""
    sample = Sample(Prompt([5], "a"), [7], [-0.5])
    assert [plain(item) for item in items(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))] == [[1.0, 2.0], [3.0, 4.0]]
    assert [plain(item)["prompt"]["text"] for item in items([sample])] == ["a"]
    scores = Scores([torch.zeros(2)], [torch.ones(2)], [])
    assert [plain(item) for item in items(scores)] == [{"logprobs": [0.0, 0.0], "entropies": [1.0, 1.0]}]
    assert [plain(item) for item in items({"a": Path("b")})] == [{"a": "b"}]
    assert items(None) == [None]
    assert items(Scores([], [], [])) == []
