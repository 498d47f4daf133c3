"""`CountsRows`: means of what a user logs are over rows, where Lightning would weigh by tokens."""

from typing import Any

import lightning.pytorch as pl


class CountsRows(pl.LightningModule):
    """A module whose batches are lists of rows.

    Lightning weighs the mean of an epoch by the size of the first tensor that it finds in a batch, which is a row's
    number of tokens here, and finds none in prompts.
    """

    _num_rows: int | None = None  # of the batch at hand; None: it is no list

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Count the rows before callbacks hear of the batch; a data module with this hook takes its place."""
        self._count_rows(batch)
        return super().on_before_batch_transfer(batch, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Count the rows."""
        self._count_rows(batch)

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Count the rows."""
        self._count_rows(batch)

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Count the rows."""
        self._count_rows(batch)

    def _count_rows(self, batch: Any) -> None:
        """Count the rows; an empty batch counts as one, since a mean over none would be nan."""
        self._num_rows = max(1, len(batch)) if isinstance(batch, list | tuple) else None

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """As Lightning's; without a `batch_size` the mean of an epoch is over the rows of its batches."""
        if kwargs.get("batch_size") is None:
            kwargs["batch_size"] = self._num_rows
        super().log(name, value, *args, **kwargs)
