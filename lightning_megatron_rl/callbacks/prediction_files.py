"""`PredictionFiles`: what `predict` returns, as JSON lines."""

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info

from lightning_megatron_rl.parallel.distributed import run_on_rank_zero
from lightning_megatron_rl.strategy.required import require_megatron
from lightning_megatron_rl.utilities.files import check_writable, create, numbered
from lightning_megatron_rl.utilities.text_files import user_path


class PredictionFiles(Callback):
    """Write the predictions of each model replica to a file, one line per item of a batch.

    A line has ``batch``, ``dataset`` (the number of the data loader), ``item`` (its place in the replica's batch),
    ``input`` and ``prediction``: of `SFTModule` log-probs and entropies per token, of `GRPOModule` and `PPOModule` the
    sample, of `RewardModule` and `DPOModule` the values of the chosen and the rejected side. The command line adds this
    callback; `trainer.predict` returns the predictions as well.

    Args:
        dirpath: Directory of the files ``predictions-dp<replica>.jsonl``; the logger's if not given. A file that is
            there already stays: then it is ``predictions-dp<replica>-2.jsonl`` and so on.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = None if dirpath is None else str(user_path(dirpath))
        self._first: Path | None = None
        self._file: Path | None = None
        self._count = 0
        self._is_first = True  # of such callbacks: the command line adds one to those of the user

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the directory and check that it can be written."""
        if stage != "predict":
            return
        strategy = require_megatron(trainer, self)
        self._is_first = next(it for it in trainer.callbacks if isinstance(it, PredictionFiles)) is self  # type: ignore[attr-defined]
        named = self.dirpath or trainer.log_dir or trainer.default_root_dir
        directory = Path(strategy.broadcast(str(named)))
        run_on_rank_zero(partial(check_writable, directory, "PredictionFiles(dirpath)"))
        replica = strategy.distributed_sampler_kwargs["rank"]
        self._first, self._file, self._count = directory / f"predictions-dp{replica}.jsonl", None, 0

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write the batch's items."""
        if not self._is_first or not trainer.strategy.replica.is_leader:  # type: ignore[attr-defined]
            return
        predictions = items(outputs)
        inputs = batch if isinstance(batch, Sequence) and len(batch) == len(predictions) else [None] * len(predictions)
        self._file = self._file or self._make()
        with self._file.open("a", encoding="utf-8") as file:
            for number, (given, prediction) in enumerate(zip(inputs, predictions, strict=True)):
                place = {"batch": batch_idx, "dataset": dataloader_idx, "item": number}
                file.write(json.dumps({**place, "input": plain(given), "prediction": plain(prediction)}) + "\n")
        self._count += len(predictions)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say where they are."""
        if self._file is not None:
            rank_zero_info(f"{self._count} predictions of the first replica are in {self._file}.")

    def _make(self) -> Path:
        assert self._first is not None
        self._first.parent.mkdir(parents=True, exist_ok=True)
        return next(path for path in numbered(self._first) if create(path))


def items(outputs: Any) -> list[Any]:
    """Return what a batch's outputs say of each of its items.

    A tensor has a row for each, a list an element, a dataclass of lists one of each list (lists of other lengths are
    left out); anything else is one item.
    """
    if isinstance(outputs, torch.Tensor) and outputs.dim() > 0:
        return list(outputs)
    if isinstance(outputs, list | tuple):
        return list(outputs)
    if is_dataclass(outputs) and not isinstance(outputs, type):
        columns = {field.name: getattr(outputs, field.name) for field in fields(outputs)}
        lists = {name: column for name, column in columns.items() if isinstance(column, list)}
        size = max((len(column) for column in lists.values()), default=0)
        if size or (columns and len(lists) == len(columns)):  # empty lists and nothing else are of an empty batch
            found = {name: column for name, column in lists.items() if len(column) == size}
            return [{name: column[row] for name, column in found.items()} for row in range(size)]
    return [outputs]


def plain(value: Any) -> Any:
    """Return numbers, texts, lists and dictionaries of them for a value; its text for what is none of these."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in fields(value)})
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
