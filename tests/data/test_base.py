"""Resume under a real Trainer, and batches over data-parallel ranks."""

import datetime
import json
import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatron_rl.data import DataSource, PromptDataModule
from lightning_megatron_rl.sample import Prompt


def rows(number: int = 22) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+0=", "answer": str(i)} for i in range(number)]


def val_rows() -> list[dict[str, Any]]:
    return rows(5)


class Recorder(L.LightningModule):
    """Remembers which prompts every step saw."""

    def __init__(self, asks_for_total_steps: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.asks_for_total_steps = asks_for_total_steps
        self.seen: list[tuple[int, int, list[int]]] = []
        self.val_seen: list[tuple[int, list[int]]] = []

    def training_step(self, batch: list[Prompt], batch_idx: int) -> torch.Tensor:
        assert all(type(prompt) is Prompt for prompt in batch)
        self.seen.append((self.trainer.current_epoch, batch_idx, [prompt.index for prompt in batch]))
        return self.weight.sum()

    def validation_step(self, batch: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.val_seen.append((dataloader_idx, [prompt.index for prompt in batch]))

    predict_step = test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.asks_for_total_steps:
            assert self.trainer.estimated_stepping_batches > 0  # builds the loaders before the checkpoint is read
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(directory: Path, callbacks: list[L.Callback] | None = None, **kwargs: Any) -> L.Trainer:
    settings = {
        "default_root_dir": directory,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "callbacks": callbacks,
        "enable_checkpointing": bool(callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**{**settings, **kwargs})


def make_data(tokenizer_dir: str, with_val: bool = False, **kwargs: Any) -> PromptDataModule:
    val = {"a": val_rows, "b": val_rows} if with_val else None
    return PromptDataModule(rows, tokenizer_dir, val, **{"batch_size": 4, **kwargs})


SAVES = {
    "every step": {"every_n_train_steps": 1},
    "epoch ends": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    "validation ends": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
}
RUNS = {
    "epochs": {"max_epochs": 3},
    "steps": {"max_steps": 13, "max_epochs": -1},
    "limited": {"max_epochs": 3, "limit_train_batches": 3},
    "validation within epochs": {"max_epochs": 3, "val_check_interval": 2},
    "validation over epochs": {"max_steps": 13, "val_check_interval": 3, "check_val_every_n_epoch": None},
    "reloaded": {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1},
}


@pytest.mark.parametrize("asks_for_total_steps", [False, True], ids=["", "asks for total steps"])
@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("run", RUNS)
def test_resume_continues_with_exactly_the_next_batch(
    tokenizer_dir: str, tmp_path: Path, run: str, saves: str, asks_for_total_steps: bool
):
    with_val = "validation" in run or "validation" in saves
    saver = ModelCheckpoint(tmp_path / "checkpoints", "{step}", save_top_k=-1, **SAVES[saves])
    reference = Recorder(asks_for_total_steps)
    trainer = make_trainer(tmp_path, [saver], **RUNS[run])
    trainer.fit(reference, make_data(tokenizer_dir, with_val))
    assert (
        trainer.global_step
        == len(reference.seen)
        == (9 if run == "limited" else 13 if "max_steps" in RUNS[run] else 15)
    )
    batches = [step[2] for step in reference.seen]
    for start in range(0, len(batches), 5):
        epoch = [index for batch in batches[start : start + 5] for index in batch]
        assert len(set(epoch)) == len(epoch)
    assert batches[:5] != batches[5:10]

    paths = sorted((tmp_path / "checkpoints").glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    assert len(paths) >= 2
    for path in paths:
        step = int(path.stem.partition("=")[2])
        if step == len(reference.seen):
            continue
        resumed = Recorder(asks_for_total_steps)
        make_trainer(tmp_path, **RUNS[run]).fit(resumed, make_data(tokenizer_dir, with_val), ckpt_path=path)
        assert [s[2] for s in resumed.seen] == [s[2] for s in reference.seen[step:]], f"resumed at step {step}"


def test_position_also_survives_a_second_fit_and_ignores_validate(tokenizer_dir: str, tmp_path: Path):
    saver = ModelCheckpoint(tmp_path / "checkpoints", "{step}", save_top_k=-1, every_n_train_steps=7)
    reference = Recorder()
    make_trainer(tmp_path, [saver], max_epochs=3).fit(reference, make_data(tokenizer_dir, with_val=True))
    path = str(tmp_path / "checkpoints" / "step=7.ckpt")

    # the same trainer trains on: so does the data
    first = Recorder()
    trainer, data = make_trainer(tmp_path, max_epochs=1), make_data(tokenizer_dir, with_val=True)
    trainer.fit(first, data)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(first, data)
    assert [s[2] for s in first.seen] == [s[2] for s in reference.seen]

    # another trainer starts anew, from the first batch, whatever was validated in between
    second = Recorder()
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.validate(second, data, ckpt_path=path)
    trainer.fit(second, data)
    assert [s[2] for s in second.seen] == [s[2] for s in reference.seen[:5]]


def test_changed_batch_size_is_refused_on_resume(tokenizer_dir: str, tmp_path: Path):
    saver = ModelCheckpoint(tmp_path / "checkpoints", "{step}", every_n_train_steps=2)
    make_trainer(tmp_path, [saver], max_steps=2).fit(Recorder(), make_data(tokenizer_dir))
    trainer = make_trainer(tmp_path, max_steps=4)
    with pytest.raises(ValueError, match="batch_size was 4, is 2"):
        trainer.fit(Recorder(), make_data(tokenizer_dir, batch_size=2), ckpt_path=tmp_path / "checkpoints/step=2.ckpt")


class EndsEpochs(Recorder):
    """Ends each epoch at its third batch, which it does not see."""

    def on_train_batch_start(self, batch: list[Prompt], batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


def test_limited_epochs_go_on_in_the_data(tokenizer_dir: str, tmp_path: Path):
    """Stock Lightning begins each epoch with the first batch. There are five here."""
    limited, ended = Recorder(), EndsEpochs()
    data = partial(make_data, tokenizer_dir, shuffle=False)
    make_trainer(tmp_path, limit_train_batches=2, max_epochs=3).fit(limited, data())
    assert [step[2][0] for step in limited.seen] == [0, 4, 8, 12, 16, 0]
    make_trainer(tmp_path, max_epochs=3).fit(ended, data())
    assert [step[2][0] for step in ended.seen] == [0, 4, 12, 16, 4, 8]


def test_overfit_repeats_the_first_batches(tokenizer_dir: str, tmp_path: Path):
    model = Recorder()
    make_trainer(tmp_path, overfit_batches=2, max_epochs=2).fit(model, make_data(tokenizer_dir))
    assert [step[2] for step in model.seen] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_validate_test_and_predict_see_every_prompt_of_every_set_once(tokenizer_dir: str, tmp_path: Path):
    expected = [(dataset, batch) for dataset in (0, 1) for batch in ([0, 1, 2], [3, 4])]
    trainer, data = make_trainer(tmp_path), make_data(tokenizer_dir, with_val=True, val_batch_size=3)
    for run in (trainer.validate, trainer.test, trainer.predict):
        model = Recorder()
        run(model, datamodule=data)
        assert model.val_seen == expected
    assert data.val_names == ["a", "b"]


def test_no_validation_set_means_no_validation(tokenizer_dir: str, tmp_path: Path, recwarn: pytest.WarningsRecorder):
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.fit(Recorder(), make_data(tokenizer_dir))
    assert not trainer.enable_validation
    assert not [w for w in recwarn if "across ranks is zero" in str(w.message)]
    with pytest.raises(MisconfigurationException, match="`val_dataloader` must be implemented"):
        trainer.validate(Recorder(), datamodule=make_data(tokenizer_dir))


@pytest.mark.parametrize(("batch_size", "remedy"), [(9, "8 or 12"), (3, "4")])
def test_batch_size_that_does_not_divide_is_refused(tokenizer_dir: str, tmp_path: Path, batch_size: int, remedy: str):
    data = make_data(tokenizer_dir, batch_size=batch_size)
    data.trainer = make_trainer(tmp_path, devices=4, strategy="ddp")
    message = rf"batch_size\({batch_size}\) / data-parallel size\(4\) = {batch_size / 4} .*set batch_size to {remedy}$"
    with pytest.raises(ValueError, match=message):
        data.setup("fit")
    data.setup("validate")  # validation batches may be uneven


@pytest.mark.parametrize(("shuffle", "batch_size"), [(False, 4), (True, 4), (False, 11)])
def test_rows_that_no_epoch_takes_are_told_of(tokenizer_dir: str, tmp_path: Path, shuffle: bool, batch_size: int):
    data = make_data(tokenizer_dir, batch_size=batch_size, shuffle=shuffle)
    data.trainer = make_trainer(tmp_path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        data.setup("fit")
    found = [str(one.message) for one in told if "data.shuffle" in str(one.message)]
    expected = "22 rows make 5 batches of 4, and the last 2 rows are trained on in no epoch"
    assert [expected in text for text in found] == ([True] if (shuffle, batch_size) == (False, 4) else [])


class WriteSeen(L.Callback):
    """Writes what a rank has seen to `directory`, since its process ends with the run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (self.directory / f"rank{trainer.global_rank}.json").write_text(
            json.dumps({"train": [step[2] for step in pl_module.seen], "val": pl_module.val_seen})
        )


@pytest.fixture
def forks() -> Iterator[None]:
    """One thread, so that a fork is safe; the port that Lightning leaves in the environment is taken out again."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with mock.patch.dict(os.environ):
        yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("forks")
def test_two_ranks_see_the_batches_of_one(tokenizer_dir: str, tmp_path: Path):
    """Real gloo processes under Lightning, resumed in the middle of the second epoch from a run on one device."""
    reference = Recorder()
    saver = ModelCheckpoint(tmp_path / "checkpoints", "{step}", save_top_k=-1, every_n_train_steps=7)
    make_trainer(tmp_path, [saver], max_epochs=2).fit(reference, make_data(tokenizer_dir, with_val=True))
    trainer = make_trainer(
        tmp_path,
        [WriteSeen(tmp_path)],
        max_epochs=2,
        devices=2,
        strategy=DDPStrategy(start_method="fork", timeout=datetime.timedelta(seconds=60)),
        num_sanity_val_steps=0,
    )
    data = make_data(tokenizer_dir, with_val=True)
    trainer.fit(Recorder(), data, ckpt_path=tmp_path / "checkpoints" / "step=7.ckpt")
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    union = [sorted(a + b) for a, b in zip(seen[0]["train"], seen[1]["train"], strict=True)]
    assert union == [sorted(step[2]) for step in reference.seen[7:]]
    assert all(len(batch) == 2 for rank in seen for batch in rank["train"])
    # 5 rows in batches of 4: two batches on both ranks, the last one empty on rank 1
    for dataset in (0, 1):
        assert [batch for index, batch in seen[0]["val"] if index == dataset] == [[0, 2], [4]]
        assert [batch for index, batch in seen[1]["val"] if index == dataset] == [[1, 3], []]


@pytest.fixture
def own_environment() -> Iterator[None]:
    """`seed_everything` leaves variables."""
    with mock.patch.dict(os.environ):
        yield


def order_of(run_seed: int, tokenizer_dir: str, directory: Path, data: dict[str, Any], **options: Any) -> list[int]:
    """Return the rows of a run in their order."""
    L.seed_everything(run_seed, verbose=False)
    model = Recorder()
    make_trainer(directory, max_epochs=2).fit(model, make_data(tokenizer_dir, **data), **options)
    return [index for step in model.seen for index in step[2]]


@pytest.mark.usefixtures("own_environment")
def test_seed_everything_sets_the_order_of_the_rows(tokenizer_dir: str, tmp_path: Path):
    order = partial(order_of, tokenizer_dir=tokenizer_dir, directory=tmp_path)
    assert order(1, data={}) == order(1, data={}) == order(2, data={"seed": 1})
    assert order(1, data={}) != order(2, data={})


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize("asks_for_total_steps", [False, True], ids=["", "asks for total steps"])
@pytest.mark.parametrize("step", [5, 7], ids=["epoch end", "within an epoch"])
def test_resumed_run_keeps_the_order_of_its_checkpoint(
    tokenizer_dir: str, tmp_path: Path, step: int, asks_for_total_steps: bool
):
    L.seed_everything(1, verbose=False)
    saver = ModelCheckpoint(tmp_path / "checkpoints", "{step}", save_top_k=-1, every_n_train_steps=step)
    reference = Recorder()
    make_trainer(tmp_path, [saver], max_epochs=3).fit(reference, make_data(tokenizer_dir))
    L.seed_everything(2, verbose=False)
    resumed, data = Recorder(asks_for_total_steps), make_data(tokenizer_dir)
    path = tmp_path / "checkpoints" / f"step={step}.ckpt"
    make_trainer(tmp_path, max_epochs=3).fit(resumed, data, ckpt_path=path)
    assert [seen[2] for seen in resumed.seen] == [seen[2] for seen in reference.seen[step:]]
    new = Recorder()  # a run of its own has the order of its own seed
    make_trainer(tmp_path, max_epochs=1).fit(new, data)
    assert new.seen[0][2] != reference.seen[0][2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": Path("rows.jsonl")}, r"a data set is .*Path\('rows\.jsonl'\): give its path as text, 'rows\.jsonl'"),
        ({"train": [{"prompt": "1+1="}]}, r"of the class list: give a path, a DataSource, or a function without arg"),
        ({"train": {"path": "rows.jsonl"}}, r"of the class dict: give a path"),
        ({"val": "rows.jsonl"}, r"data\.val='rows\.jsonl': its metrics need a name; give a dict"),
        ({"val": DataSource("rows.jsonl")}, r"data\.val=DataSource\(path='rows\.jsonl'.*its metrics need a name"),
        ({"tokenizer": Path("model")}, r"data\.tokenizer=.*Path\('model'\): name the directory or hub name .* as text"),
    ],
    ids=str,
)
def test_what_is_no_source_is_refused_before_a_run(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        PromptDataModule(**{"train": "rows.jsonl", "tokenizer": "model", "batch_size": 1, **options})


def test_path_of_a_source_is_text():
    with pytest.raises(ValueError, match=r"a data set's path is .*Path\('rows\.jsonl'\): name a .* as text"):
        DataSource(Path("rows.jsonl"))  # type: ignore[arg-type]
