"""Lightning's callbacks and Trainer flags as runs whose records are compared: stock Lightning, SFT and GRPO."""

import csv
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning.pytorch.callbacks as callbacks
import torch
from lightning.pytorch.loggers import CSVLogger

from tests.lightning_runs import BATCH_SIZE, CALLBACK_HOOKS, DATA_HOOKS, Sequences, recorder, trainers
from tests.modules.runs import MAX_RESPONSE, NUM_GENERATIONS, ReplayEngine, parity, prompts
from tests.training import make_trainer


class Stops(pl.Callback):
    """Asks for an end in the first batch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Ask."""
        trainer.should_stop = True


class Predictions(callbacks.BasePredictionWriter):
    """Counts what it is given to write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.seen: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
        """Note the batch."""
        self.seen.append((indices, _[1]))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        """Note the epoch."""
        self.seen.append((len(predictions), batch_indices))


@dataclass(frozen=True)
class Case:
    """One run.

    Args:
        options: Of the Trainer.
        callback: Made anew for each run.
        facts: What else is to be the same: called with Trainer, callback and the run's directory after the fit.
        then: "test" or "predict": called after the fit.
        logs: Whether there is a CSV logger.
        grpo: Whether GRPO is run as well; its hooks and counters are compared with stock Lightning's.
    """

    options: dict[str, Any] = field(default_factory=dict)
    callback: Callable[[], Any] | None = None
    facts: Callable[[pl.Trainer, Any, Path], Any] = lambda *_: None
    then: str = ""
    logs: bool = False
    grpo: bool = False


def csv_rows(directory: Path, names: tuple[str, ...]) -> list[tuple[str, str, float]]:
    """(step, name, value) of some metrics in a CSV logger's file."""
    (file,) = directory.glob("logs/version_0/metrics.csv")
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    return [(row["step"], name, float(row[name])) for row in rows for name in names if row.get(name)]


def logged(*names: str) -> Callable[..., Any]:
    """Facts: some metrics as they were logged."""
    return lambda trainer, callback, root: csv_rows(root, names)


def header(prefix: str) -> Callable[..., Any]:
    """Facts: which metrics with a prefix were logged."""

    def find(trainer: Any, callback: Any, root: Path) -> list[str]:
        (file,) = root.glob("logs/version_0/metrics.csv")
        return sorted(name for name in file.read_text().splitlines()[0].split(",") if name.startswith(prefix))

    return find


def kept(trainer: Any, callback: Any, root: Path) -> Any:
    """Facts: names of checkpoints, and the best of them."""
    names = sorted(path.name for path in root.rglob("*.ckpt"))
    best = callback.best_model_score if isinstance(callback, callbacks.ModelCheckpoint) else None
    return names, None if best is None else float(best)


def stopped(trainer: Any, callback: Any, root: Path) -> Any:
    """Facts of early stopping."""
    return callback.stopped_epoch, callback.wait_count, float(callback.best_score)


def summary(trainer: Any, callback: Any, root: Path) -> Any:
    """Facts: parameters in the summary of a model that is there."""
    return callbacks.ModelSummary()._summary(trainer, trainer.lightning_module).total_parameters


_VALIDATED = {"val_check_interval": 1, "limit_val_batches": 1}
CALLBACKS: dict[str, Case] = {
    "BasePredictionWriter": Case(
        {"max_steps": 1}, Predictions, lambda trainer, callback, root: callback.seen, then="predict"
    ),
    "Checkpoint": Case({"enable_checkpointing": True}, callbacks.Checkpoint, kept),
    "DeviceStatsMonitor": Case(
        {"log_every_n_steps": 1}, lambda: callbacks.DeviceStatsMonitor(True), header("DeviceStats"), logs=True
    ),
    "EarlyStopping": Case(
        {**_VALIDATED, "max_steps": 6},
        lambda: callbacks.EarlyStopping("val/loss", mode="max", patience=2),
        stopped,
    ),
    "GradientAccumulationScheduler": Case({}, lambda: callbacks.GradientAccumulationScheduler({1: 1})),
    "LambdaCallback": Case(
        {"max_steps": 2},
        lambda: callbacks.LambdaCallback(
            on_before_optimizer_step=lambda trainer, module, optimizer: [
                parameter.grad.mul_(0.5) for parameter in module.parameters()
            ]
        ),
    ),
    "LearningRateMonitor": Case({"log_every_n_steps": 1}, callbacks.LearningRateMonitor, header("lr-"), logs=True),
    "ModelCheckpoint": Case(
        {**_VALIDATED, "max_steps": 3, "enable_checkpointing": True},
        lambda: callbacks.ModelCheckpoint(
            monitor="val/loss", save_top_k=2, filename="{step}", save_on_train_epoch_end=False
        ),
        kept,
    ),
    "ModelSummary": Case({"max_steps": 1}, callbacks.ModelSummary, summary),
    "ProgressBar": Case({"enable_progress_bar": True, "max_steps": 2}, callbacks.ProgressBar),
    "RichModelSummary": Case({"max_steps": 1}, callbacks.RichModelSummary, summary),
    "RichProgressBar": Case({"enable_progress_bar": True, "max_steps": 2}, callbacks.RichProgressBar),
    "SpikeDetection": Case({}, callbacks.SpikeDetection),
    "TQDMProgressBar": Case({"enable_progress_bar": True, "max_steps": 2}, callbacks.TQDMProgressBar),
    "ThroughputMonitor": Case(
        {"log_every_n_steps": 1}, lambda: callbacks.ThroughputMonitor(len), header("train|"), logs=True
    ),
    "Timer": Case({}, lambda: callbacks.Timer(timedelta(0)), lambda trainer, *_: trainer.global_step),
}

FLAGS: dict[str, Case] = {
    "accumulate_grad_batches": Case({"accumulate_grad_batches": 1}),
    "benchmark": Case({"benchmark": False, "max_steps": 1}),
    "callbacks": Case({}, Stops, grpo=True),
    "check_val_every_n_epoch": Case(
        {"check_val_every_n_epoch": 2, "max_epochs": 2, "max_steps": -1, "limit_val_batches": 1}, grpo=True
    ),
    "default_root_dir": Case({"enable_checkpointing": True, "max_steps": 2}, None, kept),
    "detect_anomaly": Case({"detect_anomaly": True, "max_steps": 1}),
    "deterministic": Case({"deterministic": True, "max_steps": 1}),
    "enable_autolog_hparams": Case({"enable_autolog_hparams": False, "max_steps": 1}),
    "enable_checkpointing": Case({"enable_checkpointing": True, "max_epochs": 2, "max_steps": -1}, None, kept),
    "enable_model_summary": Case({"enable_model_summary": True, "max_steps": 1}),
    "enable_progress_bar": Case({"enable_progress_bar": True, "max_steps": 1}),
    "fast_dev_run": Case({"fast_dev_run": 2}, grpo=True),
    "gradient_clip_algorithm": Case({"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"}),
    "gradient_clip_val": Case({"gradient_clip_val": 0.05}),
    "limit_predict_batches": Case({"limit_predict_batches": 2, "max_steps": 1}, then="predict"),
    "limit_test_batches": Case({"limit_test_batches": 2, "max_steps": 1}, then="test"),
    "limit_train_batches": Case({"limit_train_batches": 2, "max_epochs": 2, "max_steps": -1}, grpo=True),
    "limit_val_batches": Case({"limit_val_batches": 2}, grpo=True),
    "log_every_n_steps": Case({"log_every_n_steps": 2, "max_steps": 5}, None, logged("policy/loss"), logs=True),
    "logger": Case({"log_every_n_steps": 1, **_VALIDATED}, None, logged("policy/loss", "val/loss"), logs=True),
    "max_epochs": Case({"max_epochs": 2, "max_steps": -1}, grpo=True),
    "max_steps": Case({"max_steps": 4}, grpo=True),
    "max_time": Case({"max_time": timedelta(0)}, grpo=True),
    "min_epochs": Case({"min_epochs": 2, "max_epochs": 4, "max_steps": -1}, Stops, grpo=True),
    "min_steps": Case({"min_steps": 4, "max_epochs": 4, "max_steps": -1}, Stops, grpo=True),
    "model_registry": Case({"model_registry": "nowhere", "max_steps": 1}),
    "num_sanity_val_steps": Case({"num_sanity_val_steps": 2, "limit_val_batches": 2, "max_steps": 1}, grpo=True),
    "overfit_batches": Case({"overfit_batches": 1, "max_epochs": 2, "max_steps": -1}),
    "profiler": Case(
        {"profiler": "simple", "max_steps": 1},
        None,
        lambda trainer, *_: sorted(name for name in trainer.profiler.recorded_durations if name.startswith("run_")),
    ),
    "reload_dataloaders_every_n_epochs": Case(
        {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2, "max_steps": -1, "limit_train_batches": 1}, grpo=True
    ),
    "val_check_interval": Case({"val_check_interval": 2, "limit_val_batches": 1}, grpo=True),
}


@dataclass
class Outcome:
    """What one run of a case left."""

    calls: list[Any]  # of a callback's and the data module's hooks
    step: int
    epoch: int
    facts: Any
    weights: dict[str, torch.Tensor]
    metrics: dict[str, float]


class PromptSequences(Sequences):
    """Three batches of prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences = prompts(3 * BATCH_SIZE)  # type: ignore[assignment]


def grpo_module(path: Path) -> Any:
    """One update per rollout: as many optimizer steps as batches."""
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.modules.grpo import GRPOModule
    from lightning_megatron_rl.modules.training import TrainingSettings
    from lightning_megatron_rl.rollout.protocol import SamplingParams

    return GRPOModule(
        model=str(path),
        rewards=[parity],
        engine=ReplayEngine(),
        num_generations=NUM_GENERATIONS,
        sampling=SamplingParams(temperature=0.8, max_tokens=MAX_RESPONSE),
        train=TrainingSettings(optimizer=OptimizerConfig(lr=1e-3), max_tokens_per_microbatch=96),
    )


def run_case(case: Case, make: Any, module_class: Any, data_class: type, model: Path, root: Path) -> Outcome:
    """Run a case once."""
    calls: list[Any] = []
    watching = recorder(pl.Callback, CALLBACK_HOOKS, calls)()
    callback = case.callback() if case.callback is not None else None
    options = {"max_steps": 3, "limit_val_batches": 0, "default_root_dir": str(root), **case.options}
    options["callbacks"] = [watching, *([] if callback is None else [callback])]
    if case.logs:
        options["logger"] = CSVLogger(root, name="logs")
    module, data = module_class(model), recorder(data_class, DATA_HOOKS, calls)()
    trainer = make(**options)
    trainer.fit(module, data)
    step, epoch = trainer.global_step, trainer.current_epoch
    facts = case.facts(trainer, callback, root) if not case.then else None
    if case.then:
        getattr(trainer, case.then)(module, data)
        facts = case.facts(trainer, callback, root)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = module.weights() if hasattr(module, "weights") else {}
    torch.use_deterministic_algorithms(False)
    return Outcome(calls, step, epoch, facts, weights, metrics)


def run_cases(table: str, model: Path, root: Path) -> dict[str, dict[str, Outcome]]:
    """Each case of a table under stock Lightning, as SFT and, where it says so, as GRPO."""

    def ours(**options: Any) -> pl.Trainer:
        return make_trainer({}, 1, **options)

    (stock, *of_stock), (mine, *of_mine) = trainers()
    found: dict[str, dict[str, Outcome]] = {}
    for name, case in {"callbacks": CALLBACKS, "flags": FLAGS}[table].items():
        runs = {"stock": (stock, *of_stock), "sft": (mine, *of_mine)}
        if case.grpo:
            runs["grpo"] = (ours, grpo_module, PromptSequences)
        found[name] = {kind: run_case(case, *run, model=model, root=root / name / kind) for kind, run in runs.items()}
    return found
