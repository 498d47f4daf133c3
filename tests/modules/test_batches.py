"""Batches of a DataLoader of the user's own: what is no list of the method's items is refused with what makes them."""

import re
import shutil
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_megatron_rl.data.preference import PreferenceDataModule
from lightning_megatron_rl.data.sft import SFTDataModule
from lightning_megatron_rl.modules.batches import check_prompts
from lightning_megatron_rl.modules.dpo import DPOModule
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.ppo import PPOModule
from lightning_megatron_rl.modules.reward_model import RewardModule
from lightning_megatron_rl.modules.sft import SFTModule
from tests.distributed import WorkerError
from tests.module_options import nested
from tests.modules.runs import ReplayEngine, fit_grpo, parity, prompts
from tests.tiny_models import make_tokenizer
from tests.training import Recorder, SequenceDataModule, frozen_sequences, make_trainer

ROWS = [{"prompt": "1+1="}] * 8
MODULES: dict[type, tuple[dict[str, Any], str, str]] = {
    SFTModule: ({}, "TokenSequence", "SFTDataModule"),
    DPOModule: ({}, "PreferencePair", "PreferenceDataModule"),
    GRPOModule: ({"rewards": [parity]}, "Prompt", "PromptDataModule"),
    PPOModule: ({"rewards": [parity]}, "Prompt", "PromptDataModule"),
}


@pytest.mark.parametrize("step", ["training_step", "validation_step", "test_step", "predict_step"])
@pytest.mark.parametrize("cls", MODULES, ids=lambda cls: cls.__name__)
def test_every_step_names_what_it_works_on(cls, step):
    options, item, maker = MODULES[cls]
    if "rewards" in options:
        options = {**options, "engine": ReplayEngine()}
    module = cls("nothing", **options)
    batches = {"dict": {"prompt": ["1+1="]}, "list of str": ["1+1="], "list of dict": ROWS, "str": "1+1="}
    for found, batch in batches.items():
        expected = f"^batches of {cls.__name__} are lists of {item}, which {maker} makes; got a {found}\\. Give"
        with pytest.raises(TypeError, match=expected):
            getattr(module, step)(batch, 0)
    wrong = frozen_sequences(2) if item != "TokenSequence" else prompts(2)
    with pytest.raises(TypeError, match=rf"got a list of {type(wrong[0]).__name__}\. "):
        getattr(module, step)(wrong, 0)


@pytest.mark.parametrize("step", ["training_step", "validation_step", "test_step", "predict_step"])
@pytest.mark.parametrize("cls", [GRPOModule, PPOModule], ids=lambda cls: cls.__name__)
def test_prompts_that_would_get_the_same_noise_are_refused(cls, step):
    module = cls("nothing", rewards=[parity], engine=ReplayEngine())
    first, second = prompts(2)
    expected = "two prompts of a batch have index 0 of 'train': 'prompt 0' and 'prompt 1'"
    with pytest.raises(ValueError, match=expected):
        getattr(module, step)([first, replace(second, index=0)], 0)


def test_one_prompt_twice_is_warned_about():
    """Both groups have the same responses: copies of a prompt are no way to more of them."""
    module, (first, second) = GRPOModule("nothing", rewards=[parity], engine=ReplayEngine()), prompts(2)
    with pytest.warns(UserWarning, match="one prompt more than once: seeds are made of its index"):
        check_prompts(module, [first, second, first])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_prompts(module, [first, second, replace(first, dataset="other")])


class Nothing(SequenceDataModule):
    """A loader whose batches are empty, as a sampler of one's own may leave them on a replica."""

    def train_dataloader(self) -> Any:
        return DataLoader([[]], batch_size=None)


def fit_nothing(model: Path) -> None:
    fit_grpo(model, {}, 1, data=Nothing([], 4))


def test_replica_without_a_prompt_is_told_so(worker_pool, qwen3_dir):
    with pytest.raises(WorkerError, match=r"GRPOModule has no response to train on: this replica's batch .* is empty"):
        worker_pool.run(fit_nothing, qwen3_dir, world_size=1, init_process_group=False)


LONG, FOREIGN = {"prompt": "1+1=", "completion": "2" * 90}, {"prompt": "1+1=", "completion": "<extra>"}


def sums(last: dict[str, str]) -> list[dict[str, str]]:
    """Rows of which the last one does not fit."""
    return [{"prompt": "1+1=", "completion": "2"}] * 7 + [last]


def fit_row(model: Path, cls: type, last: dict[str, str], directory: Path) -> tuple[str, int]:
    """The error of a fit whose last row does not fit, and the steps that it took before."""
    model = shutil.copytree(model, directory / "model")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(model)  # with a token more than the model has rows
    common: dict[str, Any] = {"tokenizer": str(model), "batch_size": 2, "shuffle": False}
    data: Any
    if cls is SFTModule:
        data = SFTDataModule(partial(sums, last), **common)
    else:
        rows = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "3"} for row in sums(last)]
        data = PreferenceDataModule(partial(list, rows), **common)
    recorder = Recorder()
    trainer = make_trainer({}, 1, max_steps=4, callbacks=[recorder])
    try:
        trainer.fit(cls(str(model), **nested({"max_tokens_per_microbatch": 64})), data)
    except Exception as error:
        return str(error), len(recorder.steps)
    return "", len(recorder.steps)


@pytest.mark.parametrize("cls", [SFTModule, RewardModule])
@pytest.mark.parametrize(
    ("last", "message"),
    [
        (LONG, r"train row 7 of .* has 9\d tokens, which is more than train\.max_tokens_per_microbatch=64 holds"),
        (FOREIGN, r"train row 7 of .* has the token id 128, the model's vocabulary ends at 127: data\.tokenizer="),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_the_first_step(worker_pool, qwen3_dir, tmp_path, cls, last, message):
    """The last of many rows ended a run that had gone on for long."""
    ((error, steps),) = worker_pool.run(fit_row, qwen3_dir, cls, last, tmp_path, world_size=1, init_process_group=False)
    assert re.search(message, error), error
    assert steps == 0


def fit_other_tokenizer(model: Path, directory: Path, change: str) -> tuple[str, list[str]]:
    """The error of a fit on data with a tokenizer of their own, and its warnings."""
    tokenizer = make_tokenizer()
    if change == "token":
        tokenizer.add_tokens(["<extra>"])
    elif change == "template":
        tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(directory)
    data = SFTDataModule(partial(sums, sums({})[0]), str(directory), batch_size=2, shuffle=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            make_trainer({}, 1, max_steps=1).fit(SFTModule(str(model)), data)
        except ValueError as error:
            return str(error), []
    return "", [text for one in told if "data.tokenizer" in (text := str(one.message))]


@pytest.mark.parametrize("change", ["", "token", "template"])
def test_data_have_the_models_tokenizer(worker_pool, qwen3_dir, tmp_path, change):
    """Text in another vocabulary was trained on, and sampled from, without a word."""
    ((error, told),) = worker_pool.run(
        fit_other_tokenizer, qwen3_dir, tmp_path, change, world_size=1, init_process_group=False
    )
    if change == "token":
        pattern = r"another vocabulary than the model .*: \d+ tokens, there \d+; '<extra>' has id \d+, there no id\. "
        assert re.search(pattern, error), error
        return
    assert error == ""
    expected = ["has another chat_template than the model"] if change else []
    assert [re.search("has another .* than the model", text)[0] for text in told] == expected  # type: ignore[index]


def fit_rows(model: Path) -> str:
    """The error of a fit on rows that Lightning's own DataLoader has put together."""
    try:
        fit_grpo(model, {}, 1, data=DataLoader(ROWS, batch_size=4))  # type: ignore[arg-type]
    except TypeError as error:
        return str(error)
    return ""


def test_rows_of_a_plain_dataloader_are_refused(worker_pool, qwen3_dir):
    (error,) = worker_pool.run(fit_rows, qwen3_dir, world_size=1, init_process_group=False)
    assert error.startswith("batches of GRPOModule are lists of Prompt, which PromptDataModule makes; got a dict. Give")
