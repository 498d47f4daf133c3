"""`fit --shrink` as the command line runs it: two steps with a gradient, in the smallest faithful layout."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron_rl.plan.config import FromConfig
from lightning_megatron_rl.recipes.shrink import HEAD_DIM, is_slow_here, shrink_arguments
from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine
from tests.command_line import ROOT
from tests.selection import by_default

sys.path.insert(0, str(ROOT / "scripts"))
recipes: Any = importlib.import_module("write_recipes")
tables: Any = importlib.import_module("recipe_table")
FILES = recipes.recipe_files()
QUICK = [recipes.RECIPES / "qwen3-0.6b" / "sft.yaml"]  # on one rank


@pytest.mark.deadline(430)
@pytest.mark.parametrize("path", by_default(QUICK, FILES), ids=tables.name_of)
def test_recipe_trains_two_steps(path: Path):
    found = tables.shrink(path)
    assert found["shrinks"], found
    assert found["ranks"] >= (2 if "num_nodes" in path.read_text() else 1)


@pytest.mark.parametrize(("method", "name"), [("grpo", "qwen3-0.6b-grpo"), ("grpo_lora", "qwen3-0.6b-grpo-lora")])
def test_files_are_where_the_guide_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, name: str):
    monkeypatch.chdir(tmp_path)
    shrink_arguments(["--config", str(recipes.RECIPES / "qwen3-0.6b" / f"{method}.yaml")])
    assert (tmp_path / "runs" / "shrunk" / name / "shrunk.yaml").is_file()


RIGHT = {"class_path": "lightning_megatron_rl.rewards.ExactMatch"}
PAIRS = {"class_path": "PreferenceDataModule", "init_args": {"tokenizer": "Qwen/Qwen3-0.6B", "train": "pairs.jsonl"}}
PROMPTS = {"class_path": "PromptDataModule", "init_args": {"tokenizer": "Qwen/Qwen3-0.6B", "train": "prompts.jsonl"}}


@pytest.mark.parametrize(
    ("name", "settings", "data"),
    [
        ("DPOModule", {}, PAIRS),
        ("RewardModule", {}, PAIRS),
        ("GRPOModule", {"rewards": [RIGHT]}, PROMPTS),
        (
            "GRPOModule",
            {
                "rewards": [RIGHT],
                "engine": {"class_path": "ColocatedVLLMEngine", "init_args": {"max_model_len": 4096}},
            },
            PROMPTS,
        ),
    ],
    ids=["dpo", "reward", "grpo", "colocated"],
)
def test_configs_that_are_no_recipe_are_shrunk_to_what_fit_takes(tmp_path, monkeypatch, name, settings, data):
    """No `train`, pairs in place of prompts, no engine, or one that has no setting `device`."""
    monkeypatch.chdir(tmp_path)
    model = {"class_path": name, "init_args": {"model": "Qwen/Qwen3-0.6B", **settings}}
    config = {"trainer": {"accelerator": "gpu", "devices": 8}, "model": model, "data": data}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    _, *small = shrink_arguments(["--config", "own.yaml"])
    built = FromConfig(small)
    assert type(built.model).__name__ == name
    if built.model.engine is not None:
        assert isinstance(built.model.engine, VLLMEngine)
    (row,) = set((tmp_path / built.datamodule.train_source).read_text().splitlines())
    assert {"prompt", "chosen", "rejected"} <= json.loads(row).keys()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "runs").write_text("")  # a file where the directory is to be
    path = recipes.RECIPES / "qwen3-0.6b" / "sft.yaml"
    command = [sys.executable, "-m", "lightning_megatron_rl", "fit", "--config", str(path), "--shrink"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "fit --shrink: error: [Errno 20] Not a directory: 'runs/shrunk" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("capability", "precision", "slow"),
    [("AVX2", "bf16-mixed", True), ("AVX2", "32-true", False), ("AVX512", "bf16-mixed", False)],
)
def test_a_cpu_that_is_slow_in_16_bits_is_named(monkeypatch, capability: str, precision: str, slow: bool):
    """Of other CPUs than the one that this runs on."""
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    assert is_slow_here(precision) is slow


@pytest.mark.slow
def test_shrunk_config_keeps_what_is_not_a_size(tmp_path: Path):
    """Layout in kind, precision, adapters and method stay; sizes, lengths, device and data change."""
    path = recipes.RECIPES / "llama-3.1-70b" / "grpo_lora.yaml"
    code = (
        "from lightning_megatron_rl.recipes.shrink import shrink_arguments;"
        f"print(shrink_arguments(['--config', {str(path)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.rglob("shrunk.yaml")
    small, whole = yaml.safe_load(file.read_text()), yaml.safe_load(path.read_text())
    strategy = small["trainer"]["strategy"]["init_args"]
    assert strategy["tensor_model_parallel_size"] == strategy["pipeline_model_parallel_size"] == 2
    assert strategy["sequence_parallel"] is True
    assert small["trainer"]["precision"] == whole["trainer"]["precision"] == "bf16-mixed"
    assert small["trainer"]["accelerator"] == "cpu"
    ours, theirs = small["model"]["init_args"], whole["model"]["init_args"]
    assert ours["train"]["lora"]["target_modules"] == theirs["train"]["lora"]["target_modules"]
    assert ours["loss"]["clip_high"] == theirs["loss"]["clip_high"]
    config = json.loads((file.parent / "model" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["num_attention_heads"] // config["num_key_value_heads"] == 8  # as in the released model
    assert config["hidden_size"] == config["num_attention_heads"] * HEAD_DIM
    assert config["num_hidden_layers"] == 4


@pytest.mark.slow
def test_family_that_is_refused_cannot_be_shrunk(tmp_path: Path):
    """A directory with a config.json of a supported family, one part of which is not."""
    model = tmp_path / "model"
    model.mkdir()
    raw = {
        **json.loads((ROOT / "lightning_megatron_rl" / "models" / "published.json").read_text())["qwen3-0.6b"][
            "config"
        ],
        "attention_bias": True,
    }
    (model / "config.json").write_text(json.dumps(raw))
    path = recipes.RECIPES / "qwen3-0.6b" / "sft.yaml"
    command = [sys.executable, "-m", "lightning_megatron_rl", "fit", "--config", str(path), "--shrink"]
    command += ["--model.model", str(model)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "cannot be shrunk, since it is refused at full size: qwen3 with attention_bias" in done.stderr
