"""A recipe as it ships, with random weights of full size: memory and seconds against its plan.

    python benchmarks/recipe_run.py --config configs/recipes/qwen3-0.6b/grpo.yaml --trainer.devices 1

What follows the options goes to `plan` and to `fit`, which run as they do from a shell: in a directory with a model, a
tokenizer and rows of the recipe's columns, each as long as the plan takes it. Writes ``results/recipe_<name>.json``.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from common import ROOT, default_device, facts, make_tokenizer, result_path, summary, write_json

WARMUP = 2  # steps that are not counted
PHASES = ("rollout", "old_logp", "update", "weight_sync")
TEMPLATE = (
    "{% if enable_thinking is defined %}{% endif %}"
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
OVERHEAD = 24  # words that the recipe's template and the chat's add to a prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a recipe")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--kind", help="the GPU, as `plan` calls it; that which is there")
    parser.add_argument("--work", type=Path, help="directory of the run, kept")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds")
    parser.add_argument("--out", type=Path)
    options, changes = parser.parse_known_args()
    work = options.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    config = yaml.safe_load(options.config.read_text())
    name = config["model"]["init_args"]["model"]
    prepared = ["--config", str(options.config.absolute()), *changes]
    plan = json.loads(own_command(["plan", *prepared, "--device", options.kind or kind(), "--json"], work, 120.0))
    write_random_model(work / "model", name)
    write_rows(work / "rows.jsonl", config["data"]["init_args"], plan["work"], vocabulary(work))
    (work / "overlay.yaml").write_text(yaml.safe_dump(overlay(config, work, options.steps)))
    started = time.perf_counter()
    steps, failed = run(["fit", *prepared, "--config", str(work / "overlay.yaml")], work, options.timeout)
    seconds = time.perf_counter() - started
    if failed is not None and len(steps) <= WARMUP:
        raise failed
    label = f"recipe_{options.config.parent.name}_{options.config.stem}".replace("-", "_")
    measured = against_plan(steps, plan)
    result = {
        **facts(default_device()),
        "benchmark": "recipe",
        "recipe": str(options.config),
        "changes": changes,
        "whole_run_s": seconds,
        "steps": len(steps),
        **measured,
        "plan": plan,
    }
    write_json(result_path(label, default_device(), options.out), result)
    print(json.dumps(measured, indent=1))
    if failed is not None:
        raise failed


def kind() -> str:
    """Return the GPU that is there, as `plan` calls it."""
    return torch.cuda.get_device_name().split()[1].lower() if torch.cuda.is_available() else "h200"


def run(
    arguments: list[str], work: Path, timeout_s: float
) -> tuple[list[dict[str, float]], RuntimeError | subprocess.TimeoutExpired | None]:
    """Run a command in a directory and return what it logged there, step by step, and how it failed if it did."""
    failed: RuntimeError | subprocess.TimeoutExpired | None = None
    try:
        own_command(arguments, work, timeout_s)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        failed = error  # perhaps after all steps
    return [step for found in (work / "runs").rglob("metrics.csv") for step in read_steps(found)], failed


def own_command(arguments: list[str], directory: Path, timeout_s: float) -> str:
    """Run a command of this package in a directory and return what it prints.

    Raises:
        RuntimeError: It failed; its last lines.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_megatron_rl", *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError("\n".join((done.stdout + done.stderr).splitlines()[-40:]))
    return done.stdout


def write_random_model(directory: Path, name: str) -> None:
    """Write a published model's shape with random weights, and a tokenizer of one word per token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from lightning_megatron_rl.models.published import raw_config

    if (directory / "tokenizer_config.json").exists():
        return
    raw = {**raw_config(name), "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 1}
    on_cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    with torch.device("cuda" if on_cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    del model
    if on_cuda:
        torch.cuda.empty_cache()  # for the run, which is a process of its own
    tokenizer = make_tokenizer(int(raw["vocab_size"]))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)


def vocabulary(work: Path) -> int:
    """Return the vocabulary of the model that was written."""
    return int(json.loads((work / "model" / "config.json").read_text())["vocab_size"])


def write_rows(path: Path, data: dict[str, Any], planned: dict[str, Any], vocab_size: int) -> None:
    """Write rows with the recipe's columns, as long as the plan takes them."""
    generator = torch.Generator().manual_seed(0)

    def words(count: int) -> str:
        ids = torch.randint(vocab_size - 3, (max(count, 1),), generator=generator).tolist()
        return " ".join(f"t{number}" for number in ids)

    prompt_tokens = int(planned.get("prompt_tokens") or 128) - OVERHEAD
    rest = int(planned["tokens"]) - prompt_tokens - OVERHEAD
    with path.open("w") as file:
        for _ in range(16 * int(data["batch_size"])):
            prompt, answer = words(prompt_tokens), words(rest if "completion_column" in data else 1)
            row = {
                data.get("prompt_column") or "prompt": prompt,
                data.get("answer_column") or "answer": answer,
                data.get("completion_column") or "completion": answer,
            }
            if data.get("messages_column"):
                answer = words(rest)
                chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
                row[data["messages_column"]] = chat
            file.write(json.dumps(row) + "\n")


def overlay(config: dict[str, Any], work: Path, steps: int) -> dict[str, Any]:
    """Return what is not the recipe's: the local model and rows, so many steps, and no validation."""
    model, rows = str(work / "model"), str(work / "rows.jsonl")
    arguments: dict[str, Any] = {"model": model}
    if "rewards" in config["model"]["init_args"]:  # random weights are never right, and groups need a spread
        rewards = [*config["model"]["init_args"]["rewards"], "lightning_megatron_rl.recipes.shrink.spread"]
        arguments |= {"rewards": rewards, "reward_weights": [1.0] * len(rewards)}
    return {
        "trainer": {"max_steps": steps, "limit_val_batches": 0},
        "model": {"init_args": arguments},
        "data": {"init_args": {"tokenizer": model, "train": rows, "val": None}},
    }


def read_steps(path: Path) -> list[dict[str, float]]:
    """Return what was logged of each step."""
    with path.open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if "time/step_s" in row]


def against_plan(steps: list[dict[str, float]], plan: dict[str, Any]) -> dict[str, Any]:
    """Return measured figures beside the plan's."""
    kept = steps[WARMUP:]
    planned = {part["phase"]: part["seconds"] for part in plan["seconds"]}
    return {
        "step_s": summary([step["time/step_s"] for step in kept]),
        "planned_step_s": plan["step_seconds"],
        "phases": {
            name: summary([step[f"time/{name}_s"] for step in kept]) for name in PHASES if f"time/{name}_s" in kept[0]
        },
        "planned_phases": planned,
        "peak_memory_gb": max(step.get("perf/peak_mem_gb", 0.0) for step in steps),
        "kept_while_sampling_gb": max(step.get("perf/trainer_kept_gb", 0.0) for step in steps),
        "planned_memory_gib": plan["needed_gib"],
        "response_tokens": summary([step.get("rollout/response_len_mean", 0.0) for step in kept]),
    }


if __name__ == "__main__":
    main()
