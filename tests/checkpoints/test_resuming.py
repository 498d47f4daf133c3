"""Whether a run that begins is resumed, which Lightning keeps to itself until the weights are loaded."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron_rl.checkpoints.resuming import resumes

ADVICE = (
    "Lightning has changed: `Trainer._run` no longer has a run's checkpoint in `ckpt_path` while it calls `setup`."
    " Let `resumes` find it where it is now; until then `HFExport` refuses a run only when its weights are loaded."
)


class Line(pl.LightningModule):
    """One weight, and no data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(range(4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Asks(pl.Callback):
    """Keeps what is told in `setup`, and what `other` tells of another Trainer's run, started there."""

    def __init__(self, other: pl.Trainer | None = None) -> None:
        self.told: list[bool | None] = []
        self.other = other

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self.told.append(resumes(trainer))
        if self.other is not None:
            self.told.append(resumes(self.other))
            self.other.fit(Line())
            self.told.append(resumes(trainer))


def make_trainer(directory: Path, *callbacks: pl.Callback, max_steps: int = 1) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        max_steps=max_steps,
        callbacks=[ModelCheckpoint(directory, "{step}", every_n_train_steps=1, save_last=True), *callbacks],
    )


@pytest.mark.filterwarnings("ignore")
def test_a_run_knows_in_setup_whether_it_is_resumed(tmp_path: Path):
    """By a path and by a word, before the weights are loaded; not by what an earlier run of the Trainer was given."""
    asks = Asks()
    trainer = make_trainer(tmp_path, asks)
    assert resumes(trainer) is None, "nothing runs"
    trainer.fit(Line(), ckpt_path="last")  # there is none yet
    for given in (tmp_path / "step=1.ckpt", "last"):
        make_trainer(tmp_path, asks, max_steps=2).fit(Line(), ckpt_path=given)
    assert asks.told == [False, True, True], ADVICE
    trainer.validate(Line(), torch.utils.data.DataLoader(range(1)), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert trainer.ckpt_path is not None
    trainer.fit(Line())
    assert asks.told[3:] == [True, False], ADVICE
    assert resumes(trainer) is None


@pytest.mark.filterwarnings("ignore")
def test_another_trainers_run_is_not_taken_for_it(tmp_path: Path):
    make_trainer(tmp_path).fit(Line())
    asks = Asks(make_trainer(tmp_path / "other"))
    make_trainer(tmp_path, asks, max_steps=2).fit(Line(), ckpt_path=tmp_path / "last.ckpt")
    assert asks.told == [True, None, True]


def test_a_name_that_lightning_has_changed_tells_nothing():
    class Trainer:
        def _run(self, checkpoint: str) -> bool | None:
            return resumes(self)  # type: ignore[arg-type]

    Trainer._run.__code__ = Trainer._run.__code__.replace(co_qualname="Trainer._run")
    assert Trainer()._run("a.ckpt") is None
