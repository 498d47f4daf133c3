"""Hub names of the recipes through the real loading code, on a cache of the hub's own layout, without a network."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants
from transformers import AutoConfig

from lightning_megatron_rl.data.templates import load_tokenizer
from lightning_megatron_rl.models.families.check import check_family
from lightning_megatron_rl.models.hf.files import local_checkpoint
from lightning_megatron_rl.models.published import raw_config
from lightning_megatron_rl.recipes.shrink import small_config, write_model
from tests.command_line import ROOT
from tests.recipes.hub_cache import put_in_cache

sys.path.insert(0, str(ROOT / "scripts"))
recipes: Any = importlib.import_module("write_recipes")


def named(path: Path) -> set[tuple[str, str, bool]]:
    """Model, tokenizer, and whether there is a chat template, that a recipe names."""
    config = yaml.safe_load(path.read_text())
    data = config["data"]["init_args"]
    return {(config["model"]["init_args"]["model"], data["tokenizer"], bool(data.get("apply_chat_template")))}


@pytest.fixture
def hub_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def test_names_of_recipes_are_resolved(hub_home: Path, tmp_path_factory: pytest.TempPathFactory):
    """Released config.json, a tokenizer and a chat template in files of their own; weights are small ones.

    Recipes of models that are published quantised name the directory that their header's commands write.
    """
    found = {names for path in recipes.recipe_files() for names in named(path) if "/" in names[0]}
    assert len({model for model, _, _ in found}) >= 14
    small = write_model(tmp_path_factory.mktemp("small"), small_config("qwen3-0.6b", 2), {})
    for model in {name for name, _, _ in found}:
        snapshot = put_in_cache(hub_home, model, small)
        (snapshot / "config.json").write_text(json.dumps(raw_config(model)))
    for model, tokenizer, chats in found:
        path = local_checkpoint(model)
        check_family(AutoConfig.from_pretrained(path))
        assert AutoConfig.from_pretrained(path).model_type == raw_config(model)["model_type"]
        loaded = load_tokenizer(tokenizer)
        if chats:
            text = loaded.apply_chat_template(
                [{"role": "user", "content": "1 + 1"}], tokenize=False, add_generation_prompt=True
            )
            assert text == "user: 1 + 1<eos>assistant: "


def test_a_name_that_is_not_in_the_cache_is_said(hub_home: Path):
    with pytest.raises(ValueError, match=r"cannot download model 'Qwen/Qwen3-0.6B', which is no directory in"):
        local_checkpoint("Qwen/Qwen3-0.6B")
