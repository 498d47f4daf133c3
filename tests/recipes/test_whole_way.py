"""A shrunk recipe goes the whole way: hub name, checkpoint, resume, export, and sampling from the export."""

import csv
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import ROOT
from tests.distributed import CHILD_PATH
from tests.recipes.hub_cache import put_in_cache

sys.path.insert(0, str(ROOT / "scripts"))
recipes: Any = importlib.import_module("write_recipes")
WAYS = ["qwen3-0.6b/grpo", "qwen2.5-0.5b/grpo_lora", "qwen3-30b-a3b/sft"]  # dense, adapters, a mixture
SAMPLER = 1e-4  # exports are in the recipe's bf16, on which both compute in fp32: other orders of sums


def run(directory: Path, *arguments: str | Path) -> str:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": CHILD_PATH,
        "HF_HOME": str(directory / "hub_home"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.deadline(900)
@pytest.mark.parametrize("name", WAYS)
def test_shrunk_recipe_goes_the_whole_way(name: str, tmp_path: Path):
    path = recipes.RECIPES / f"{name}.yaml"
    hub_name = yaml.safe_load(path.read_text())["model"]["init_args"]["model"]
    run(tmp_path, "lightning_megatron_rl", "fit", "--config", path, "--shrink")
    (config,) = tmp_path.rglob("shrunk.yaml")
    put_in_cache(tmp_path / "hub_home", hub_name, config.parent / "model")
    more = ["--model.model", hub_name, "--data.tokenizer", hub_name, "--trainer.max_steps", "4", "--ckpt_path", "last"]
    run(tmp_path, "lightning_megatron_rl", "fit", "--config", config, *more)
    steps = [
        int(row["step"])
        for file in sorted(config.parent.rglob("metrics*.csv"))
        for row in csv.DictReader(file.open())
        if row.get("policy/grad_norm")
    ]
    assert steps[-1] == 4  # two before, two after
    assert set(steps) == {1, 2, 3, 4}
    (export,) = {file.parent for file in config.parent.rglob("model*.safetensors") if "hf" in file.parts}
    found = json.loads(run(tmp_path, "tests.recipes.sample_export", export).splitlines()[-1])
    assert found["tokens"] == 48
    assert found["worst"] < SAMPLER
