"""Samples as tables of loggers that have them: Weights & Biases, MLflow, TensorBoard as text."""

import html
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_megatron_rl.sample import Sample

COLUMNS = ("step", "prompt", "response", "answer", "reward", "tokens", "end")
KEY = "samples"
_LONGEST = 4_000  # characters of a text; of longer ones the end, where the answer is, stays too


@rank_zero_only
def log_samples(loggers: Sequence[Logger], samples: Sequence[Sample], step: int) -> None:
    """Send samples of a step to every logger that takes tables; others are left alone.

    Args:
        loggers: The Trainer's.
        samples: A few: each is a row.
        step: As metrics have it.
    """
    rows = [_row(sample, step) for sample in samples]
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_table(KEY, columns=list(COLUMNS), data=rows, step=step)
        elif isinstance(logger, MLFlowLogger):
            columns = {name: [row[place] for row in rows] for place, name in enumerate(COLUMNS)}
            # a file for each step: MLflow reads and writes the whole of one that rows are added to
            logger.experiment.log_table(logger.run_id, columns, f"{KEY}/step-{step:06d}.json")
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(KEY, _markdown(rows), step)


def _row(sample: Sample, step: int) -> list[Any]:
    texts = (sample.prompt.text, sample.response, sample.prompt.answer or "")
    return [step, *map(_short, texts), float(sample.reward), len(sample.policy_ids), sample.finish_reason]


def _short(text: str) -> str:
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"


def _markdown(rows: Sequence[Sequence[Any]]) -> str:
    """A table of Markdown in which texts are no markup of either language."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = [html.escape(str(cell)).replace("\\", "\\\\").replace("|", "\\|").replace("`", "\\`") for cell in row]
        lines.append(f"| {' | '.join(cell.replace(chr(10), '<br>') for cell in cells)} |")
    return "\n".join(lines)
