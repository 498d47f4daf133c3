"""Code in a model's directory is not run, whatever stdin says, unless the user's environment asks for it."""

import io
import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from lightning_megatron_rl.data.templates import load_tokenizer
from lightning_megatron_rl.models.hf.model import HFModel
from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine
from lightning_megatron_rl.rollout.vllm.settings import llm_arguments
from lightning_megatron_rl.utilities.remote_code import VARIABLE, trusts_remote_code

CODE = """
from pathlib import Path
Path({mark!r}).write_text("this code ran")
from transformers import PretrainedConfig, PreTrainedTokenizerFast

class OwnConfig(PretrainedConfig):
    model_type = "own"

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def mark(tmp_path) -> Path:
    return tmp_path / "mark"


@pytest.fixture(params=["tokenizer", "config"])
def model(request, qwen3_dir, tmp_path, mark) -> tuple[str, Path]:
    """Which file of a model names code, and its directory."""
    directory = tmp_path / "model"
    shutil.copytree(qwen3_dir, directory)
    (directory / "own.py").write_text(CODE.format(mark=str(mark)))
    name, changes = {
        "tokenizer": (
            "tokenizer_config.json",
            {
                "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]},
                "tokenizer_class": "OwnTokenizer",
            },
        ),
        "config": ("config.json", {"auto_map": {"AutoConfig": "own.OwnConfig"}, "model_type": "own"}),
    }[request.param]
    content = json.loads((directory / name).read_text())
    (directory / name).write_text(json.dumps({**content, **changes}))
    if request.param == "tokenizer":
        (directory / "config.json").unlink()  # by which Transformers would find a tokenizer of its own
    return request.param, directory


def load(what: str, directory: Path) -> None:
    if what == "tokenizer":
        load_tokenizer(str(directory))
    else:
        HFModel(str(directory))


def test_code_is_refused_and_the_switch_is_named(model, mark, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ValueError, match=f"Python code, which is not run.*{VARIABLE}=1"):
        load(*model)
    assert not mark.exists()


def test_an_answer_on_stdin_runs_nothing(model, mark, monkeypatch):
    """Left to itself, Transformers asks there."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    with pytest.raises(ValueError, match="is not run"):
        load(*model)
    assert not mark.exists()


def test_code_runs_where_the_environment_asks_for_it(model, mark, monkeypatch, tmp_path):
    """Or the tests above would pass whatever happened."""
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    # a config class of its own is read, but no family is known by that type
    with pytest.raises(ValueError, match="'own'") if model[0] == "config" else nullcontext():
        load(*model)
    assert mark.read_text() == "this code ran"


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("0", False), ("1", True), ("True", True)])
def test_one_switch_for_the_sampler_too(value, expected, monkeypatch):
    if value is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, value)
    arguments = llm_arguments(VLLMEngine(), "model", "cpu", stored_dtype="float32", eager=True)
    assert arguments["trust_remote_code"] is expected
    assert trusts_remote_code() is expected


def test_a_value_that_is_neither_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "yes please")
    with pytest.raises(ValueError, match=f"{VARIABLE}='yes please'"):
        trusts_remote_code()
