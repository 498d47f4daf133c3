"""The examples run: the script on a tiny model with real vLLM and two ranks, the user's own parts also from YAML."""

import ast
import csv
import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron_rl.environments import Action, Calculator, Ending, Reply
from lightning_megatron_rl.rewards import compute_rewards, reward_name
from lightning_megatron_rl.sample import Prompt, Sample
from tests.command_line import ROOT, build
from tests.distributed import CHILD_PATH

EXAMPLES = ROOT / "examples"


def run(*command: str | Path) -> str:
    """Run a Python command from the repository's root and return what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": CHILD_PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_sums_are_those_that_the_demos_model_has_learnt(script):
    """It writes answers from the lowest digit up: asked for others, it is wrong from the start."""
    config = yaml.safe_load((ROOT / "configs" / "demo" / "sft.yaml").read_text())
    assert config["data"]["init_args"]["train"]["init_args"]["lowest_digit_first"] is True
    calls = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Call)]
    for call in calls:
        if ast.unparse(call.func) in ("ArithmeticRows", "ArithmeticPairs"):
            assert "lowest_digit_first=True" in ast.unparse(call)


def test_script_with_two_ranks(qwen3_dir, tmp_path):
    output = run(EXAMPLES / "grpo_script.py", "--model", qwen3_dir, "--steps", "1", "--devices", "2", "--out", tmp_path)
    assert "world 2 = tp 2 x pp 1" in output
    assert "You have overridden" not in output
    assert re.search(r"held-out accuracy after 1 steps: [01]\.\d{3}\n", output)
    assert "policy/grad_norm" in (tmp_path / "metrics.csv").read_text()
    lines = (tmp_path / "samples" / "rollouts-dp0.jsonl").read_text().splitlines()
    assert len(lines) == 256  # of 64 prompts x 8 generations: the most that are written of a step
    assert {"prompt", "response", "reward"} <= json.loads(lines[0]).keys()


@pytest.mark.slow
def test_streaming_script(qwen3_dir, tmp_path):
    """The second run replays the first one's record: the same weights, bit for bit."""
    script = (EXAMPLES / "streaming_script.py", "--model", qwen3_dir, "--steps", "4")
    first = run(*script, "--out", tmp_path / "first")
    record = tmp_path / "first" / "samples" / "rollouts-dp0.jsonl"
    again = run(*script, "--out", tmp_path / "again", "--replay", record)
    weights = [re.findall(r"sha256 of the weights after 4 steps: (\w{64})\n", output) for output in (first, again)]
    assert weights[0] == weights[1] != []
    assert "streaming" in first
    assert [line for line in first.splitlines() if line.startswith("staleness of the last batch: at most ")]


@pytest.mark.slow
def test_sft_script(qwen3_dir, tmp_path):
    """Batches of tokens on two replicas; its checkpoint starts another run."""
    arguments = ("--model", qwen3_dir, "--rows", "300", "--epochs", "1", "--devices", "2", "--out", tmp_path)
    output = run(EXAMPLES / "sft_script.py", *arguments)
    assert "at most 512, of at most 2048 tokens together" in output
    assert re.search(r"held-out loss after [1-9] steps: \d+\.\d{3}, perplexity \d+\.\d{3}\n", output)
    (checkpoint,) = re.findall(r"init_from=(\S+)", output)
    assert Path(checkpoint).is_dir()


@pytest.mark.slow
def test_ppo_script(qwen3_dir, tmp_path):
    arguments = ("--model", qwen3_dir, "--steps", "1", "--prompts", "8", "--devices", "1", "--out", tmp_path)
    output = run(EXAMPLES / "ppo_script.py", *arguments)
    assert re.search(r"held-out accuracy after 1 steps: [01]\.\d{3}\n", output)
    assert re.search(r"explained variance of the critic: -?\d+\.\d{3}\n", output)
    assert "critic/grad_norm" in (tmp_path / "metrics.csv").read_text()


@pytest.mark.slow
def test_distillation_script(qwen3_dir, tmp_path):
    """The student is its own teacher: there is nothing to learn, on two replicas."""
    models = ("--student", qwen3_dir, "--teacher", qwen3_dir)
    short = ("--steps", "1", "--prompts", "8", "--devices", "2", "--out", tmp_path)
    output = run(EXAMPLES / "distillation_script.py", *models, *short)
    (distance,) = re.findall(r"KL to the teacher after 1 steps: (\d\.\d{4})\n", output)
    assert float(distance) < 1e-4  # two passes in fp32 over the same weights


@pytest.mark.slow
def test_rewards_and_evaluation(qwen3_dir, tmp_path):
    output = run(EXAMPLES / "rewards_and_evaluation.py", "--model", qwen3_dir, "--prompts", "10", "--out", tmp_path)
    lines = re.findall(r"^val/(\w+/\w+) +(-?\d\.\d+)  \[(-?\d\.\d+), (-?\d\.\d+)\]$", output, re.MULTILINE)
    assert len(lines) == 2 * 5, output
    for name, value, low, high in lines:
        assert float(low) <= float(value) <= float(high), name
    samples = (tmp_path / "evaluation-dp0.jsonl").read_text().splitlines()
    assert len(samples) == 2 * 10 * (1 + 8)


def test_yaml_of_the_documents_builds(tmp_path):
    """The blocks of docs/rewards.md, over the demo's config."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "rewards.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    demo = ROOT / "configs" / "demo" / "grpo.yaml"
    for number, block in enumerate(blocks):
        (tmp_path / f"{number}.yaml").write_text(block)
    rewards = build("fit", "--config", demo, "--config", tmp_path / "0.yaml").model.rewards
    assert [reward_name(reward) for reward in rewards] == ["math_equal", "length_penalty", "http"]
    assert (rewards[2].deadline_s, rewards[2].default) == (30, -1.0)
    evaluated = build("fit", "--config", demo, "--config", tmp_path / "1.yaml")
    assert evaluated.model.evaluation.settings.pass_at == (1, 4, 8)
    assert evaluated.datamodule.val_names == ["gsm8k", "own"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["reward_model", "dpo"])
def test_preferences_script(qwen3_dir, tmp_path, method):
    arguments = ("--model", qwen3_dir, "--method", method, "--steps", "1", "--devices", "1", "--out", tmp_path)
    output = run(EXAMPLES / "preferences_script.py", *arguments)
    assert "pairs per update" in output
    assert re.search(rf"{method}: held-out pairs the right way round after 1 steps: [01]\.\d{{3}}\n", output)
    assert "preference/accuracy" in (tmp_path / method / "metrics.csv").read_text()
    assert (tmp_path / method / "hf" / "last" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "game",
    ["grid", "calculator", "guessing", "countdown"],
)
def test_environments_script(qwen3_dir, tmp_path, game):
    """Real vLLM over several turns; log-probs of trainer and sampler agree on the policy's tokens of all of them."""
    arguments = ("--model", qwen3_dir, "--game", game, "--steps", "1", "--prompts", "8", "--out", tmp_path)
    output = run(EXAMPLES / "environments_script.py", *arguments)
    assert re.search(rf"{game}: after 1 steps reward -?\d\.\d+, success [01]\.\d+, \d\.\d+ turns\n", output)
    with (tmp_path / game / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["mismatch/abs_logp_diff"]) < 1e-4  # fp32 on both sides
    assert float(row["reward/environment_failed_frac"]) == 0
    lines = (tmp_path / game / "samples" / "rollouts-dp0.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 8 * 8
    assert all(sample["turns"] and sample["outcome"]["reason"] in ("done", "max_turns", "length") for sample in samples)
    if game in ("grid", "guessing"):
        assert float(row["episode/turns_max"]) > 1


def test_environment_of_the_documents_plays(tmp_path):
    """The code and the YAML of docs/environments.md."""
    text = (ROOT / "docs" / "environments.md").read_text()
    first, second = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "first.yaml").write_text(first)
    (tmp_path / "second.yaml").write_text(second)
    demo = ROOT / "configs" / "demo" / "grpo.yaml"
    cli = build("fit", "--config", demo, "--config", tmp_path / "first.yaml", "--config", tmp_path / "second.yaml")
    assert isinstance(cli.model.environment, Calculator)
    assert cli.model.rewards == []
    assert (cli.model.episodes.max_turns, cli.model.sampling.stop) == (3, ("]",))
    assert cli.model.episodes.reply_template == "\n<|im_start|>user\n{reply}<|im_end|>\n<|im_start|>assistant\n"
    names: dict[str, Any] = {}
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(code, names)
    episode = names["Echo"]().start(Prompt([1], "say it", answer="yes"), 0)
    assert episode.step(Action("no", [1])) == Reply("Not quite: no", reward=-0.1)
    assert episode.step(Action("oh yes", [1])) == Reply(done=True)
    assert episode.finish("done") == Ending(1.0, True)


@pytest.fixture
def own(monkeypatch):
    """The module with a reward function, a reward class and a callback of a user's own."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("custom_callback_and_reward")


def test_own_rewards(own):
    prompt = Prompt(token_ids=[1], text="7+5=", answer="12", index=0, dataset="train")
    samples = [Sample(prompt, [0] * length, [-0.1] * length, text, "stop", 0) for text, length in
               (("12", 3), (" 12", 4), ("2", 2), ("13", 8), ("", 1))]  # fmt: skip
    compute_rewards(samples, [own.last_digit, own.Brevity(budget=4)], [1.0, 0.1])
    assert [sample.rewards["last_digit"] for sample in samples] == [1.0, 1.0, 0.3, 0.0, 0.0]
    assert [sample.rewards["brevity"] for sample in samples] == [1.0, 1.0, 1.0, 0.5, 1.0]
    assert samples[3].reward == pytest.approx(0.05)


def test_own_parts_from_yaml(own, tmp_path):
    """The overlay of the module's docstring, over the demo's config; test_cli_runs.py runs the callback."""
    overlay = re.search(r"code-block:: yaml\n\n((?:    .*\n|\n)+)", own.__doc__)
    assert overlay
    (tmp_path / "custom.yaml").write_text(textwrap.dedent(overlay[1]))
    demo = ROOT / "configs" / "demo" / "grpo.yaml"
    cli = build("fit", "--config", demo, "--config", tmp_path / "custom.yaml")
    function, brevity = cli.model.rewards
    assert function is own.last_digit
    assert (type(brevity), brevity.budget) == (own.Brevity, 4)
    assert cli.model.reward_weights == [1.0, 0.1]
    kinds = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert {"RolloutSamples", "HFExport", "ModelCheckpoint", "LengthHistogram"} <= set(kinds)  # added, not replaced
