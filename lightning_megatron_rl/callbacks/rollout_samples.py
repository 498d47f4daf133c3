"""`RolloutSamples`: what the policy writes, for the eye and for later."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_only

from lightning_megatron_rl.files import check_writable
from lightning_megatron_rl.ranges import COUNT, COUNT_OR_NONE, check_ranges
from lightning_megatron_rl.rollout.record import record_line
from lightning_megatron_rl.sample import Sample
from lightning_megatron_rl.strategy.distributed import run_on_rank_zero
from lightning_megatron_rl.text_files import user_path

_CONSOLE_WIDTH = 200  # characters of a prompt or response that the console shows


class RolloutSamples(Callback):
    """Show a few samples of a step on the console and keep all of them, those of validation too, as JSON lines.

    Args:
        num_samples: Samples per shown step on the console; 0 shows none.
        every_n_steps: Steps between two shows; files get every step.
        dirpath: Directory of the files, one per model replica; ``samples`` in the logger's directory if not given.

    Example:
        ``Trainer(callbacks=[RolloutSamples(num_samples=2, every_n_steps=10)])``
    """

    def __init__(self, num_samples: int = 3, every_n_steps: int = 10, dirpath: str | None = None) -> None:
        check_ranges({"num_samples": COUNT_OR_NONE, "every_n_steps": COUNT}, locals(), "RolloutSamples.")
        self.num_samples = num_samples
        self.every_n_steps = every_n_steps
        self.dirpath = None if dirpath is None else str(user_path(dirpath))
        self._file: Path | None = None
        self._evaluation_file: Path | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the directory and check that it can be written."""
        root = Path(self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "samples")
        root = Path(trainer.strategy.broadcast(str(root)))
        run_on_rank_zero(partial(check_writable, root, "RolloutSamples(dirpath)"))
        replica = trainer.strategy.distributed_sampler_kwargs["rank"]  # type: ignore[attr-defined]
        self._file = root / f"rollouts-dp{replica}.jsonl"
        self._evaluation_file = root / f"evaluation-dp{replica}.jsonl"

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write the step's samples, show some."""
        if pl_module.last_rollout is None:
            return
        samples: list[Sample] = pl_module.last_rollout.samples
        if trainer.strategy.replica.is_leader:  # type: ignore[attr-defined]
            assert self._file is not None
            _append(self._file, samples, trainer.global_step)
        if self.num_samples and (trainer.global_step - 1) % self.every_n_steps == 0:
            _show(samples[: self.num_samples], trainer.global_step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Write the samples of the validation, all sets together."""
        if trainer.sanity_checking or not trainer.strategy.replica.is_leader:  # type: ignore[attr-defined]
            return
        assert self._evaluation_file is not None
        _append(self._evaluation_file, pl_module.evaluation.samples, trainer.global_step)

    def on_test_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """As for validation."""
        self.on_validation_end(trainer, pl_module)


def _append(file: Path, samples: list[Sample], step: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as stream:
        stream.writelines(record_line(sample, step) for sample in samples)


@rank_zero_only
def _show(samples: list[Sample], step: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"samples of step {step}", title_justify="left", expand=False)
    for column, justify in (("prompt", "left"), ("response", "left"), ("answer", "left"), ("reward", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for sample in samples:
        texts = (sample.prompt.text, sample.response, sample.prompt.answer or "")
        table.add_row(*(Text(text[:_CONSOLE_WIDTH]) for text in texts), f"{sample.reward:.2f}")
    Console().print(table)
