"""What a user's module or callback logs is averaged over rows, not over the tokens of each batch's first row."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.modules.sft import SFTModule
from tests.lightning_cases import grpo_module
from tests.modules.runs import prompts
from tests.training import SequenceDataModule, frozen_sequences, make_trainer

ROWS = 10  # in batches of 4, 4 and 2: 0, 1 and 2 have a mean of (4 * 0 + 4 * 1 + 2 * 2) / 10
MEAN = 0.8


class UsersModule(SFTModule):
    """Logs the index of each batch."""

    def training_step(self, sequences: list[TokenSequence], batch_idx: int) -> Any:
        loss = super().training_step(sequences, batch_idx)
        self.log("mine", float(batch_idx), on_step=False, on_epoch=True)
        self.log("first", float(batch_idx), on_step=False, on_epoch=True, batch_size=1)
        return loss

    def validation_step(self, sequences: list[TokenSequence], batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(sequences, batch_idx, dataloader_idx)
        self.log_dict({"val/mine": float(batch_idx)})

    def test_step(self, sequences: list[TokenSequence], batch_idx: int, dataloader_idx: int = 0) -> None:
        super().test_step(sequences, batch_idx, dataloader_idx)
        self.log("test/mine", float(batch_idx))


class Sets(SequenceDataModule):
    """The same rows for all."""

    def test_dataloader(self) -> Any:
        return self.train_dataloader()


class UsersCallback(pl.Callback):
    """Logs the index of each batch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.log("mine", float(batch_idx), on_step=False, on_epoch=True)


class AtStart(pl.Callback):
    """Logs the index of each batch before the module hears of it."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        module.log("at_start", float(batch_idx), on_step=False, on_epoch=True)

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        module.log(f"{trainer.state.stage.value}/at_start", float(batch_idx))

    on_test_batch_start = on_validation_batch_start


def log_means(model: Path) -> dict[str, float]:
    found = {}
    module, data = UsersModule(str(model)), Sets(frozen_sequences(ROWS), 4)
    trainer = make_trainer({}, 1, max_epochs=1, callbacks=[AtStart()])
    trainer.fit(module, data)
    found |= trainer.callback_metrics
    found |= make_trainer({}, 1, callbacks=[AtStart()]).test(module, data, verbose=False)[0]
    prompted = make_trainer({}, 1, max_epochs=1, limit_val_batches=0, callbacks=[UsersCallback()])
    prompted.fit(grpo_module(model), SequenceDataModule(prompts(ROWS), 4))
    found["grpo"] = prompted.callback_metrics["mine"]
    return {name: float(value) for name, value in found.items()}


def test_means_of_an_epoch_are_over_rows(worker_pool, qwen3_dir):
    """Lightning takes a row's tokens for the size of its batch, and finds no size in a list of prompts."""
    (found,) = worker_pool.run(log_means, qwen3_dir, world_size=1, init_process_group=False)
    at_start = ("at_start", "validate/at_start", "test/at_start")
    for name in ("mine", "val/mine", "test/mine", "grpo", *at_start):
        assert found[name] == pytest.approx(MEAN), name
    assert found["first"] == pytest.approx(1.0), "a size that is given is taken"
