"""What `benchmarks/recipe_run.py` hands to a recipe, and what it reads from its run."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
common: Any = importlib.import_module("common")
recipe_run: Any = importlib.import_module("recipe_run")
VOCABULARY = 1000
RECIPES = ROOT / "configs" / "recipes"


@pytest.mark.parametrize(
    ("recipe", "planned"),
    [
        ("qwen3-0.6b/grpo", {"tokens": 1280, "prompt_tokens": 256}),
        ("qwen3-0.6b/sft", {"tokens": 2048, "prompt_tokens": 0}),
        ("qwen3-4b/sft", {"tokens": 4096, "prompt_tokens": 0}),  # a column of messages
    ],
)
def test_rows_are_as_long_as_the_plan_takes_them(tmp_path: Path, recipe: str, planned: dict[str, int]):
    """A few tokens shorter: what is longer would be dropped, and the run would be of other work than the plan."""
    data = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())["data"]["init_args"]
    recipe_run.write_rows(tmp_path / "rows.jsonl", data, planned, VOCABULARY)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 16 * data["batch_size"]
    tokenizer = common.make_tokenizer(VOCABULARY)
    tokenizer.chat_template = recipe_run.TEMPLATE
    row = rows[0]
    if data.get("messages_column"):
        messages = row[data["messages_column"]]
    else:
        prompt = data.get("prompt_template", "{prompt}").replace("{prompt}", row[data["prompt_column"]])
        messages = [{"role": "user", "content": prompt}]
        if "completion_column" in data:
            messages.append({"role": "assistant", "content": row[data["completion_column"]]})
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    wanted = planned["prompt_tokens"] or planned["tokens"]
    assert wanted - recipe_run.OVERHEAD <= len(tokenizer(text)["input_ids"]) <= wanted


def test_a_recipe_keeps_its_rewards_and_gets_one_with_a_spread():
    config = yaml.safe_load((RECIPES / "qwen3-0.6b" / "grpo.yaml").read_text())
    found = recipe_run.overlay(config, Path("work"), 10)
    rewards = found["model"]["init_args"]["rewards"]
    assert rewards == [*config["model"]["init_args"]["rewards"], "lightning_megatron_rl.recipes.shrink.spread"]
    assert found["trainer"] == {"max_steps": 10, "limit_val_batches": 0}
    assert found["data"]["init_args"]["train"] == "work/rows.jsonl"


def test_measured_figures_stand_beside_the_plan_s(tmp_path: Path):
    (tmp_path / "metrics.csv").write_text(
        "step,time/step_s,time/update_s,perf/peak_mem_gb,loss\n"
        "0,9.0,5.0,3.0,\n1,9.0,5.0,4.0,\n1,,,,0.5\n2,2.0,1.0,4.0,\n3,4.0,3.0,4.0,\n"
    )
    steps = recipe_run.read_steps(tmp_path / "metrics.csv")
    plan = {"seconds": [{"phase": "update", "seconds": 2.5}], "step_seconds": 3.5, "needed_gib": 5.0}
    found = recipe_run.against_plan(steps, plan)
    assert len(steps) == 4
    assert (found["step_s"]["median"], found["planned_step_s"]) == (3.0, 3.5)  # without the first two
    assert found["phases"]["update"]["median"] == 2.0
    assert found["planned_phases"] == {"update": 2.5}
    assert (found["peak_memory_gb"], found["planned_memory_gib"]) == (4.0, 5.0)


def test_steps_of_a_run_that_fails_are_there(tmp_path: Path):
    log = tmp_path / "runs/some-model/grpo/log/version_0/metrics.csv"
    log.parent.mkdir(parents=True)
    log.write_text("step,time/step_s\n1,2.5\n")
    steps, failed = recipe_run.run(["fit", "--config", "missing.yaml"], tmp_path, 120.0)
    assert steps == [{"step": 1.0, "time/step_s": 2.5}]
    assert isinstance(failed, RuntimeError)
    assert "missing.yaml" in str(failed)
    assert recipe_run.run(["--help"], tmp_path, 0.01)[0] == steps  # one that takes too long
