"""`RunReport` in real fits: at the end, on failure, where it cannot be written, and without a place to write to."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_megatron_rl.callbacks.rollout_samples import RolloutSamples
from lightning_megatron_rl.callbacks.run_report import RunReport
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.utilities.notices import RunFailedError
from tests.command_line import ROOT, build
from tests.modules.runs import fit_grpo
from tests.notices import collected, informed
from tests.report.runs import write_run
from tests.strategy.test_megatron import LAYOUTS

GRPO = ROOT / "configs" / "demo" / "grpo.yaml"


class Fails(Callback):
    """Ends a run by an error behind its second step."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            raise self.error


class Spoils(Callback):
    """Puts something that is no report in the place of the report."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        directory = Path(trainer.log_dir)  # a collective
        if trainer.is_global_zero:
            (directory / "report.html").write_text("mine")


def fit(model: Path, directory: Path, world_size: int, strategy: Any, *callbacks: Callback, csv: bool = True) -> Any:
    """Fit three steps; returns the error that ended the run, warnings and errors, and information."""
    logger = CSVLogger(directory, name="", version="") if csv else False
    own = [callback for callback in callbacks if isinstance(callback, RunReport)] or [RunReport()]
    others = [callback for callback in callbacks if not isinstance(callback, RunReport)]
    error = ""
    with collected() as told, informed() as said:
        try:
            fit_grpo(
                model,
                strategy,
                world_size,
                steps=3,
                callbacks=[RolloutSamples(0, dirpath=os.path.relpath(directory / "texts")), *own, *others],
                trainer={"logger": logger, "log_every_n_steps": 1},
            )
        except (ValueError, RunFailedError, SIGTERMException) as caught:
            error = f"{type(caught).__name__}: {caught}"
    return error, told, said


def run(pool: Any, model: Path, directory: Path, *callbacks: Callback, layout: str = "", **options: Any) -> Any:
    world_size, strategy = LAYOUTS[layout] if layout else (1, {})
    function = FitJob(options)
    return pool.run(
        function, model, directory, world_size, strategy, *callbacks, world_size=world_size, init_process_group=False
    )


class FitJob:
    """`fit` with options, which can be sent to a worker."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def __call__(self, *args: Any) -> Any:
        return fit(*args, **self.options)


def facts(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "run.json").read_text()))


def test_a_run_of_two_replicas_ends_with_its_report(worker_pool, qwen3_dir, tmp_path):
    found = run(worker_pool, qwen3_dir, tmp_path, layout="dp2")
    assert [error for error, _, _ in found] == ["", ""]
    assert sum("report:" in line for line in found[0][2]) == 1
    text = (tmp_path / "report.html").read_text()
    assert all(said in text for said in ("prompts per rollout", "2 replicas", "megatron-core", "finished 20"))
    data = text.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    samples = json.loads(data)["samples"]
    assert {row["step"] for row in samples if row["kind"] == "training"} == {1, 2, 3}
    assert len({row["name"] for row in samples if row["kind"] == "training"}) == 12  # of both replicas
    kept = facts(tmp_path)
    assert kept["samples"] == [str(tmp_path / "texts")]  # a whole path, for a report that is written elsewhere
    assert kept["step"] == 3
    assert kept["memory_plan"] is None  # nothing is planned on a CPU
    assert dict(kept["table"])["samples per rollout"] == "4 prompts x 4 generations = 16"


def test_a_run_that_fails_leaves_a_report_that_says_why(worker_pool, qwen3_dir, tmp_path):
    ((error, _, _),) = run(
        worker_pool, qwen3_dir, tmp_path, Fails(ValueError("the <b>reward</b> has gone; password=x"))
    )
    assert error.startswith("ValueError: the <b>reward</b>")
    text = (tmp_path / "report.html").read_text()
    assert "by ValueError: the &lt;b&gt;reward&lt;/b&gt; has gone; password=***" in text
    assert facts(tmp_path)["step"] == 2
    assert "reward/mean" in (tmp_path / "metrics.csv").read_text()  # what the logger had in memory is written first


def test_a_run_that_is_told_to_stop_writes_its_facts_alone(worker_pool, qwen3_dir, tmp_path):
    run(worker_pool, qwen3_dir, tmp_path, Fails(SIGTERMException()))
    assert not (tmp_path / "report.html").exists()
    assert "SIGTERMException" in facts(tmp_path)["ending"]


def test_a_report_that_fails_is_said_aloud_and_ends_the_run_in_an_error_on_all_ranks(worker_pool, qwen3_dir, tmp_path):
    found = run(worker_pool, qwen3_dir, tmp_path, Spoils(), layout="dp2")
    for error, _, _ in found:
        assert error.startswith("RunFailedError")
        assert "RunReport FAILED" in error
        assert "is no report of this command" in error
    assert [sum("RunReport FAILED" in line for line in told) for _, told, _ in found] == [1, 0]
    assert (tmp_path / "report.html").read_text() == "mine"
    assert "finished" in facts(tmp_path)["ending"]


def test_without_a_csv_logger_it_says_that_there_is_none(worker_pool, qwen3_dir, tmp_path):
    ((error, told, said),) = run(worker_pool, qwen3_dir, tmp_path, csv=False)
    assert (error, told) == ("", [])
    assert any("no report, since the run has no CSVLogger" in line for line in said)


def test_it_can_be_switched_off(worker_pool, qwen3_dir, tmp_path):
    ((error, _, _),) = run(worker_pool, qwen3_dir, tmp_path, RunReport(at_end=False))
    assert error == ""
    assert not (tmp_path / "report.html").exists()
    assert "finished" in facts(tmp_path)["ending"]


def test_a_fit_that_is_refused_early_leaves_the_directory_of_another_run_alone(tmp_path):
    """Before the strategy has chosen the directory it may be an earlier run's."""

    write_run(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.loggers = [CSVLogger(tmp_path, name="", version="")]
    RunReport().on_exception(trainer, LightningModule(), ValueError("refused"))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_fit_with_another_strategy_leaves_the_directory_of_another_run_alone(tmp_path):
    """The module refuses it before any logger opens its files, and the report's `setup` alone writes nothing."""
    write_run(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    report = RunReport()
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=CSVLogger(tmp_path, name="", version=""), callbacks=[report], max_steps=1
    )
    with pytest.raises(TypeError, match="SFTModule runs on MegatronStrategy, the Trainer has SingleDeviceStrategy"):
        trainer.fit(SFTModule("nothing"), [])
    report.setup(trainer, LightningModule(), "fit")
    report.on_exception(trainer, LightningModule(), ValueError("refused"))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("own", [True, False])
def test_the_command_line_adds_one_unless_there_is_one(own):
    given = ["--trainer.callbacks+=RunReport", "--trainer.callbacks.at_end=false"] if own else []
    cli = build("fit", "--config", GRPO, *given)
    (found,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, RunReport)]
    assert found.at_end is not own
