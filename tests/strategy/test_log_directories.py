"""No run deletes or overwrites what another has logged; a resumed run continues its log, at the same steps."""

import csv
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron_rl.callbacks.run_report import RunReport
from lightning_megatron_rl.compat.csv_logger import AppendingWriter
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.modules.training import TrainingSettings
from lightning_megatron_rl.strategy.log_directories import LogDirectories
from lightning_megatron_rl.utilities.files import Lock
from tests.full_disk import files_of_at_most
from tests.training import SequenceDataModule, frozen_sequences, make_trainer


def rows(directory: Path) -> list[dict[str, str]]:
    """The rows of a directory's metrics."""
    with (directory / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def trained(directory: Path) -> list[int]:
    """The steps of which a directory has training metrics."""
    return [int(row["step"]) for row in rows(directory) if row.get("policy/loss")]


class Logs:
    """Runs of one worker that log into `save_dir`, each with a Trainer, a logger and a module of its own."""

    def __init__(self, model: Path, directory: Path, world_size: int, version: Any, save_dir: Any = None) -> None:
        self.model, self.directory, self.world_size, self.version = model, directory, world_size, version
        self.save_dir = save_dir or directory

    def trainer(self, steps: int) -> Any:
        keeper = ModelCheckpoint(self.directory / "checkpoints", "{step}", every_n_train_steps=1, save_top_k=-1)
        logger = CSVLogger(self.save_dir, name="run", version=self.version)
        return make_trainer(
            {},
            self.world_size,
            max_steps=steps,
            enable_checkpointing=True,
            callbacks=[keeper],
            logger=logger,
            log_every_n_steps=1,
            val_check_interval=2,
            check_val_every_n_epoch=None,
        )

    def module(self) -> SFTModule:
        from megatron.core.optimizer import OptimizerConfig

        return SFTModule(
            str(self.model), train=TrainingSettings(optimizer=OptimizerConfig(lr=1e-3), max_tokens_per_microbatch=64)
        )

    def fit(self, steps: int, ckpt_path: Path | None = None) -> tuple[str, Any]:
        trainer = self.trainer(steps)
        trainer.fit(self.module(), SequenceDataModule(frozen_sequences(4 * steps), 4), ckpt_path=ckpt_path)
        trainer.strategy.barrier()
        return self._place(trainer), trainer

    def evaluate(self, command: str) -> str:
        trainer = self.trainer(1)
        data = SequenceDataModule(frozen_sequences(4), 4)
        data.test_dataloader = data.predict_dataloader = data.train_dataloader  # type: ignore[method-assign]
        getattr(trainer, command)(self.module(), data)
        trainer.strategy.barrier()
        return self._place(trainer)

    def _place(self, trainer: Any) -> str:
        return str(Path(trainer.logger.log_dir).relative_to(self.directory / "run"))


def run_into_one_directory(model: Path, directory: Path, world_size: int) -> dict[str, Any]:
    """Where each command logs whose logger has the version "", and what the first run's log is at the end."""
    logs = Logs(model, directory, world_size, "")
    places: dict[str, Any] = {"fit": logs.fit(2)[0], "validate": [], "test": [], "predict": []}
    first = (directory / "run" / "metrics.csv").read_bytes()
    for command in ("validate", "test", "predict", "validate"):
        places[command].append(logs.evaluate(command))
    kept = (directory / "run" / "metrics.csv").read_bytes() == first
    places["resumed"] = logs.fit(4, directory / "checkpoints" / "step=2.ckpt")[0]
    places["other"], other = logs.fit(1)
    places["other again"] = logs.fit(2, Path(other.checkpoint_callback.best_model_path))[0]
    lock = Lock(directory / "run" / ".lightning-megatron-rl-run")
    with closing(lock), pytest.raises(RuntimeError, match="another process is writing the log"):
        logs.fit(5, directory / "checkpoints" / "step=2.ckpt")
    return {"places": places, "kept": kept}


@pytest.fixture(scope="module")
def shared(worker_pool, qwen3_dir, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("shared")
    arguments = (run_into_one_directory, qwen3_dir, directory, 1)
    (found,) = worker_pool.run(*arguments, world_size=1, init_process_group=False)
    return directory / "run", found


def test_every_other_run_gets_a_directory_of_its_own(shared):
    """With a version of the user's own `CSVLogger` deletes the metrics that it finds."""
    _, found = shared
    assert found["kept"]
    places = found["places"]
    assert places["fit"] == places["resumed"] == "."
    assert places["validate"] == ["validate", "validate-2"]
    assert (places["test"], places["predict"]) == (["test"], ["predict"])
    assert places["other"] == places["other again"] == "fit-2"


def test_a_resumed_run_continues_its_log_at_the_steps_of_its_checkpoints(shared):
    """`global_step`, which Lightning's own count is one below; validations too, and Lightning's epoch stays."""
    directory, _ = shared
    assert trained(directory) == [1, 2, 3, 4]
    # the checkpoint of step 2 was saved before the validation of that step, which the resumed run begins with
    assert [int(row["step"]) for row in rows(directory) if row["val/loss"]] == [2, 2, 4]
    assert all(row["epoch"] for row in rows(directory))
    assert trained(directory / "fit-2") == [1, 2]
    assert len(rows(directory / "validate")) == len(rows(directory / "validate-2")) == 1


def test_loggers_get_the_settings(shared):
    """Of module, data module and strategy, whoever built them."""
    directory, _ = shared
    settings = yaml.safe_load((directory / "hparams.yaml").read_text())
    assert settings["model"]["class"] == "SFTModule"
    assert settings["model"]["train_settings"]["max_tokens_per_microbatch"] == 64
    assert settings["model"]["train_settings"]["optimizer"]["lr"] == 1e-3
    assert settings["data"]["batch_size"] == 4
    assert settings["strategy"]["tensor_model_parallel_size"] == 1
    assert settings["strategy"]["async_save"] is True
    assert settings["trainer"]["max_steps"] == 4
    assert settings["versions"]["megatron-core"]
    assert settings["run_id"]


def fit_with_numbers(model: Path, directory: Path, world_size: int) -> list[str]:
    """Where three runs log whose logger counts versions by itself; another process has taken one before it logs."""
    logs = Logs(model, directory, world_size, None)
    places = [logs.fit(1)[0]]
    taken = directory / "run" / "version_1"
    taken.mkdir(exist_ok=True)  # by either rank
    (taken / "metrics.csv").write_bytes(b"step\r\n1\r\n")
    logs.version = 1  # as two runs choose that start at the same time
    places.append(logs.fit(1)[0])
    return [*places, (taken / "metrics.csv").read_bytes()]


def take_twice(directory: Path) -> list[str]:
    """What is said of two loggers of one directory; one alone may have it afterwards."""
    loggers, logs, said = [CSVLogger(directory, name="run", version="") for _ in range(2)], LogDirectories(), []
    for chosen in (loggers, loggers[1:]):
        try:
            logs.take(chosen, "fit", "this run", resumes=False)
        except ValueError as error:
            said.append(str(error))
        logs.release()
    return said


def test_two_loggers_of_one_directory_are_refused_by_name(worker_pool, tmp_path):
    """They were told that another process had it."""
    (said,) = worker_pool.run(take_twice, tmp_path, world_size=1)[0]
    assert said.startswith(f"two CSVLoggers of the Trainer write into {tmp_path / 'run'}: each would have its rows")


@pytest.mark.slow
def test_numbered_versions_are_counted_on(worker_pool, qwen3_dir, tmp_path):
    arguments = (fit_with_numbers, qwen3_dir, tmp_path, 2)
    for found in worker_pool.run(*arguments, world_size=2, init_process_group=False):
        assert found == ["version_0", "version_2", b"step\r\n1\r\n"]


def fit_without_metrics(model: Path, directory: Path, world_size: int) -> list[str]:
    """Where runs log of which the first has done no step and the second has ended before it logged a metric."""
    places, logs = [], Logs(model, directory, world_size, "")
    for rows in (0, 4, 4):
        trainer = logs.trainer(1)
        trainer.log_every_n_steps, trainer.callbacks = 50, [*trainer.callbacks, RunReport()]
        trainer.fit(logs.module(), SequenceDataModule(frozen_sequences(rows), 4))
        trainer.strategy.barrier()
        places.append(logs._place(trainer))
    return places


def test_a_run_that_has_logged_no_metric_keeps_its_directory(worker_pool, qwen3_dir, tmp_path):
    """Its settings, facts and report are there."""
    arguments = (fit_without_metrics, qwen3_dir, tmp_path, 1)
    assert worker_pool.run(*arguments, world_size=1, init_process_group=False) == [[".", ".", "fit-2"]]


def fit_in_home(model: Path, directory: Path, world_size: int) -> list[str]:
    """Where two runs log whose logger's directory begins with `~`, and what has been written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(directory))
        (directory / "elsewhere").mkdir()
        patch.chdir(directory / "elsewhere")
        logs = Logs(model, directory, world_size, "", save_dir="~")
        return [logs.fit(2)[0], logs.fit(1)[0], *(str(path) for path in Path().iterdir())]


def test_home_directory_is_one_for_metrics_and_all_else(worker_pool, qwen3_dir, tmp_path):
    """The writer of metrics knows `~`, the paths that others make of the logger's directory do not."""
    arguments = (fit_in_home, qwen3_dir, tmp_path, 1)
    assert worker_pool.run(*arguments, world_size=1, init_process_group=False) == [[".", "fit-2"]]
    assert (trained(tmp_path / "run"), trained(tmp_path / "run" / "fit-2")) == ([1, 2], [1])


def test_half_a_row_of_a_killed_run_stays_apart(tmp_path):
    """And the header that is there is the one that new rows have."""
    (tmp_path / "metrics.csv").write_bytes(b"a,b,step\r\n1,2,0\r\n3,")
    writer = AppendingWriter(str(tmp_path))
    writer.log_metrics({"b": 5.0, "a": 4.0}, 2)
    writer.save()
    assert (tmp_path / "metrics.csv").read_bytes() == b"a,b,step\r\n1,2,0\r\n3,\r\n4.0,5.0,2\r\n"
    writer.log_metrics({"c": 6.0}, 3)
    writer.save()
    assert [row.get("c") for row in rows(tmp_path)] == ["", "", "", "6.0"]


def test_a_new_column_on_a_full_disk_loses_no_row(tmp_path):
    """Lightning's writer empties the file before it writes it with the new header."""
    writer = AppendingWriter(str(tmp_path))
    for step in range(50):
        writer.log_metrics({"loss": 0.5}, step)
    writer.save()
    written = (tmp_path / "metrics.csv").read_bytes()
    writer.log_metrics({"val/loss": 0.25}, 50)
    with files_of_at_most(100), pytest.raises(OSError, match="File too large"):
        writer.save()
    assert (tmp_path / "metrics.csv").read_bytes() == written
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]
    writer.save()  # there is room again
    assert [row["step"] for row in rows(tmp_path)] == [str(step) for step in range(51)]
    assert [row["val/loss"] for row in rows(tmp_path)] == [""] * 50 + ["0.25"]


@pytest.mark.parametrize("begun", [False, True])
def test_rows_for_which_there_is_no_room_are_not_there_in_part(tmp_path, begun):
    """The next row would stand behind half a one."""
    writer = AppendingWriter(str(tmp_path))
    writer.log_metrics({"loss": 0.5}, 0)
    if begun:
        writer.save()
    for step in range(1, 30):
        writer.log_metrics({"loss": 0.5}, step)
    with files_of_at_most(100), pytest.raises(OSError, match=r"File too large: '.*metrics\.csv'"):
        writer.save()
    if begun:
        assert len(rows(tmp_path)) == 1
    writer.save()
    assert [row["step"] for row in rows(tmp_path)] == [str(step) for step in range(30)]


def test_a_row_with_more_values_than_columns_does_not_end_the_log(tmp_path):
    """As after a row that was cut short and written on: Lightning's writer raises with half the file rewritten."""
    (tmp_path / "metrics.csv").write_bytes(b"a,step\r\n1,0\r\n2,3,1\r\n4,2\r\n")
    writer = AppendingWriter(str(tmp_path))
    writer.log_metrics({"a": 5.0, "b": 6.0}, 3)
    writer.save()
    assert [(row["a"], row["b"]) for row in rows(tmp_path)] == [("1", ""), ("2", ""), ("4", ""), ("5.0", "6.0")]
