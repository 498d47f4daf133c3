"""Batches of a DataLoader of the user's own: what is no list of the method's items is refused with what makes them."""

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_megatron_rl.modules.dpo import DPOModule
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.ppo import PPOModule
from lightning_megatron_rl.modules.sft import SFTModule
from tests.modules.runs import ReplayEngine, fit_grpo, parity, prompts
from tests.training import frozen_sequences

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
