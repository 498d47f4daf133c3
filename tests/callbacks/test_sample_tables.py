"""Samples and settings in real loggers without a network; each test skips where its package is not installed."""

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron_rl.callbacks.rollout_samples import RolloutSamples
from lightning_megatron_rl.callbacks.sample_tables import COLUMNS, _markdown, _row, log_samples
from lightning_megatron_rl.sample import Prompt, Sample
from tests.modules.runs import fit_grpo

TRICKY = "a|b`c`\n<script>1</script>"


def samples() -> list[Sample]:
    prompt = Prompt([5, 6], TRICKY, answer="7")
    return [Sample(prompt, [7, 8], [-0.5, -0.1], response=text, reward=0.5) for text in (TRICKY, "x" * 9_000)]


def test_rows_are_short_and_have_every_column():
    rows = [_row(sample, 10) for sample in samples()]
    assert rows[0] == [10, TRICKY, TRICKY, "7", 0.5, 2, "stop"]
    assert len(rows[1][2]) < 4_100
    assert "5000 characters" in rows[1][2]
    text = _markdown(rows)
    assert all(line.count("|") - line.count("\\|") == len(COLUMNS) + 1 for line in text.splitlines())
    assert len(text.splitlines()) == 4
    assert "<script>" not in text


def test_a_logger_without_tables_is_left_alone(tmp_path):
    log_samples([CSVLogger(tmp_path, name="", version="")], samples(), 10)
    assert list(tmp_path.iterdir()) == []


def test_weights_and_biases_gets_a_table_and_the_settings(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra `loggers` is not installed")
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "dryrun")  # as the logger sets it
    logger = WandbLogger(save_dir=tmp_path, offline=True, project="test")
    try:
        logger.log_hyperparams({"model": {"lr": 0.125}})
        log_samples([logger], samples(), 10)
        assert logger.experiment.config["model"] == {"lr": 0.125}
        (file,) = Path(logger.experiment.dir).rglob("*.table.json")
        table = json.loads(file.read_text())
        assert table["columns"] == list(COLUMNS)
        assert table["data"][0][:3] == [10, TRICKY, TRICKY]
    finally:
        wandb.finish()
        wandb.teardown()


def test_mlflow_gets_a_table_for_each_step_and_the_settings(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="the extra `loggers` is not installed")
    from lightning.pytorch.loggers import MLFlowLogger

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}")  # as the logger sets it
    logger = MLFlowLogger(tracking_uri=f"file:{tmp_path}")
    logger.log_hyperparams({"model": {"lr": 0.125}})
    for step in (10, 20):
        log_samples([logger], samples(), step)
    first, second = sorted(tmp_path.rglob("samples/*.json"))
    assert (first.name, second.name) == ("step-000010.json", "step-000020.json")
    table = json.loads(first.read_text())
    assert table["columns"] == list(COLUMNS)
    assert table["data"][0][:3] == [10, TRICKY, TRICKY]
    assert logger.experiment.get_run(logger.run_id).data.params == {"model/lr": "0.125"}


def fit(model: Path, directory: Path, world_size: int) -> bool:
    """A run with a logger of TensorBoard; whether the package is there."""
    try:
        from lightning.pytorch.loggers import TensorBoardLogger

        logger = TensorBoardLogger(directory, name="", version="")
    except ModuleNotFoundError:
        return False
    callbacks: list[Any] = [RolloutSamples(num_samples=2, every_n_steps=2, dirpath=str(directory / "samples"))]
    fit_grpo(model, {}, world_size, steps=3, callbacks=callbacks, trainer={"logger": logger, "log_every_n_steps": 1})
    return True


def test_tensorboard_gets_text_of_the_steps_that_are_shown_and_the_settings(worker_pool, qwen3_dir, tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `loggers` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (there,) = worker_pool.run(fit, qwen3_dir, tmp_path, 1, world_size=1, init_process_group=False)
    assert there
    events = EventAccumulator(str(tmp_path)).Reload()
    (tag,) = [tag for tag in events.Tags()["tensors"] if tag.startswith("samples")]
    found = events.Tensors(tag)
    assert [event.step for event in found] == [1, 3]
    assert found[0].tensor_proto.string_val[0].decode().startswith("| step | prompt | response |")
    assert "class: GRPOModule" in (tmp_path / "hparams.yaml").read_text()
