"""`RolloutSamples`: samples of the policy on the console, in loggers and in files."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from lightning_megatron_rl.callbacks.sample_tables import log_samples
from lightning_megatron_rl.checkpoints.resuming import resumes
from lightning_megatron_rl.parallel.distributed import run_on_rank_zero
from lightning_megatron_rl.rollout.record import Origin, record_line
from lightning_megatron_rl.rollout.record_file import RecordFile
from lightning_megatron_rl.sample import Sample
from lightning_megatron_rl.strategy.required import require_megatron
from lightning_megatron_rl.utilities.console import line_start, printable
from lightning_megatron_rl.utilities.files import check_writable
from lightning_megatron_rl.utilities.ranges import COUNT, COUNT_OR_NONE, POSITIVE, check_ranges
from lightning_megatron_rl.utilities.seeds import run_seed
from lightning_megatron_rl.utilities.text_files import user_path

_CONSOLE_WIDTH = 200  # characters of a prompt or response that the console shows


class RolloutSamples(Callback):
    """Show a few samples of a step on the console and keep samples, those of validation too, as JSON lines.

    What the console shows goes to loggers that take tables, too: Weights & Biases, MLflow, TensorBoard (as text).

    Each run has files of its own: a resumed run continues them, another run in the same directory writes
    ``rollouts-dp0-2.jsonl`` and so on (see `RecordFile`). Steps are `global_step`, as in the metrics and the names of
    checkpoints.

    Args:
        num_samples: Samples per shown step on the console and in tables of loggers; 0 shows none.
        every_n_steps: Steps between two shows; files get every step.
        dirpath: Directory of the files, one per model replica; ``samples`` in the logger's directory if not given.
        max_samples_per_step: Most samples of a step, and of a validation, that a replica's file gets: those of the
            first prompts, with all responses to them. None for all.
        max_file_mb: Size in 10^6 bytes at which a file gets no more samples. None for no limit.

    A message says when the limits begin to leave samples out, and another at the end how many were written.
    """

    def __init__(
        self,
        num_samples: int = 3,
        every_n_steps: int = 10,
        dirpath: str | None = None,
        max_samples_per_step: int | None = 256,
        max_file_mb: float | None = 1000.0,
    ) -> None:
        ranges = {
            "num_samples": COUNT_OR_NONE,
            "every_n_steps": COUNT,
            "max_samples_per_step": COUNT.called("null writes all samples"),
            "max_file_mb": POSITIVE.called("it is a size in 10^6 bytes; null sets no limit"),
        }
        check_ranges(ranges, locals(), "RolloutSamples.")
        self.num_samples = num_samples
        self.every_n_steps = every_n_steps
        self.dirpath = None if dirpath is None else str(user_path(dirpath))
        self.max_samples_per_step = max_samples_per_step
        self.max_file_mb = max_file_mb
        self.directory: Path | None = None  # of the run's files, as a whole path
        self._run_id, self._origin = "", Origin()
        self._rollouts: RecordFile | None = None
        self._evaluations: RecordFile | None = None
        self._num_seen = self._num_written = 0  # samples of this replica, in this run

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the directory and check that it can be written."""
        strategy = require_megatron(trainer, self)
        root = Path(self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "samples")
        root = Path(strategy.broadcast(str(root)))
        self.directory = root.resolve()
        run_on_rank_zero(partial(check_writable, root, "RolloutSamples(dirpath)"))
        replica = strategy.distributed_sampler_kwargs["rank"]
        self._run_id, self._num_seen, self._num_written = strategy.run_id, 0, 0
        self._origin = Origin()
        size = float("inf") if self.max_file_mb is None else self.max_file_mb * 1e6
        again = stage == "fit" and resumes(trainer) is True
        make = partial(RecordFile, run_id=self._run_id, max_bytes=size, resumes=again)
        self._rollouts = make(root / f"rollouts-dp{replica}.jsonl")
        self._evaluations = make(root / f"evaluation-dp{replica}.jsonl")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write the step's samples, show some."""
        if pl_module.last_rollout is None:
            return
        samples: list[Sample] = pl_module.last_rollout.samples
        if trainer.strategy.replica.is_leader:  # type: ignore[attr-defined]
            if not self._origin.model:
                self._origin = Origin(pl_module.hf_model.fingerprint, run_seed())
            self._append(self._rollouts, samples, trainer.global_step)
        if self.num_samples and (trainer.global_step - 1) % self.every_n_steps == 0:
            _show(samples[: self.num_samples], trainer.global_step)
            log_samples(trainer.loggers, samples[: self.num_samples], trainer.global_step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Write the samples of the validation, all sets together."""
        if trainer.sanity_checking or not trainer.strategy.replica.is_leader:  # type: ignore[attr-defined]
            return
        self._append(self._evaluations, pl_module.evaluation.samples, trainer.global_step)

    def on_test_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """As for validation."""
        self.on_validation_end(trainer, pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Say what was left out."""
        if self._num_written < self._num_seen:
            self._tell(f"of {self._num_seen} samples of the first replica {self._num_written} were written")
        self._num_seen = self._num_written = 0

    def _append(self, file: RecordFile | None, samples: list[Sample], step: int) -> None:
        assert file is not None
        kept = whole_groups(samples, self.max_samples_per_step)
        number = file.append([record_line(sample, step, self._run_id, self._origin) for sample in kept], step)
        if self._num_written == self._num_seen and number < len(samples):
            self._tell(f"{number} of {len(samples)} samples of step {step} go into {file.path}, and so on from here")
        self._num_seen += len(samples)
        self._num_written += number

    def _tell(self, what: str) -> None:
        """Inform: the limits are settings, and training has used all samples."""
        rank_zero_info(
            f"RolloutSamples: {what} (max_samples_per_step={self.max_samples_per_step},"
            f" max_file_mb={self.max_file_mb}; null for no limit)."
        )


def whole_groups(samples: Sequence[Sample], limit: int | None) -> Sequence[Sample]:
    """Return the first samples, at most `limit` of them, with all responses to a prompt or none of them.

    If the first group is larger than the limit, it is cut.
    """
    if limit is None or len(samples) <= limit:
        return samples
    end = limit
    while end > 0 and samples[end].prompt is samples[end - 1].prompt:
        end -= 1
    return samples[: end or limit]


@rank_zero_only
def _show(samples: list[Sample], step: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"samples of step {step}", title_justify="left", expand=False)
    for column, justify in (("prompt", "left"), ("response", "left"), ("answer", "left"), ("reward", "right")):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for sample in samples:
        texts = (sample.prompt.text, sample.response, sample.prompt.answer or "")
        shown = (Text(printable(text[:_CONSOLE_WIDTH], sys.stdout)) for text in texts)
        table.add_row(*shown, f"{sample.reward:.2f}")
    print(line_start(sys.stdout), end="")
    Console().print(table)
