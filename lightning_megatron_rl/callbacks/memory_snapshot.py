"""`MemorySnapshot`: torch's record of every allocation on the GPU, written for the steps that are asked for."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback

from lightning_megatron_rl.compat.torch_names import record_memory, write_memory_record
from lightning_megatron_rl.utilities.ranges import COUNT, COUNT_OR_NONE, check_ranges
from lightning_megatron_rl.utilities.text_files import user_path


class MemorySnapshot(Callback):
    """Write a snapshot of the GPU's memory with the stack of each allocation, for https://pytorch.org/memory_viz.

    One file per rank, ``<directory>/step=3.rank=0.pickle``, and one when the run ends with an error, such as out of
    memory. Recording costs a few percent of time.

    Args:
        directory: Where the files go.
        steps: Steps of which a file is written when they end, counted from 0: 9 is the step that the log calls 10.
            Unset: the first.
        max_entries: Allocations that are remembered; older ones are forgotten.

    Raises:
        ValueError: A negative step, or nothing to remember.
        RuntimeError: When the run starts: it is not on CUDA.
    """

    def __init__(self, directory: str, steps: list[int] | None = None, max_entries: int = 100_000) -> None:
        self.steps = [0] if steps is None else steps
        ranges = {"steps": COUNT_OR_NONE.called("it is a global_step"), "max_entries": COUNT}
        check_ranges(ranges, locals(), "MemorySnapshot.")
        self.directory = user_path(directory)
        self.max_entries = max_entries

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to record."""
        device = trainer.strategy.root_device
        if device.type != "cuda":
            raise RuntimeError(
                f"MemorySnapshot records allocations on a GPU, this run is on {device.type!r}: leave it out, or use"
                " Trainer(accelerator='cuda')."
            )
        record_memory(self.max_entries)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write the step that ends, if it was asked for."""
        step = trainer.global_step - 1
        if step in self.steps:
            self._write(trainer, f"step={step}")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write what there is when the run fails."""
        if trainer.strategy.root_device.type == "cuda":
            self._write(trainer, "error")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record no more."""
        record_memory(None)

    def _write(self, trainer: pl.Trainer, name: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        write_memory_record(str(self.directory / f"{name}.rank={trainer.global_rank}.pickle"))
