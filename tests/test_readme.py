"""What README.md and docs/metrics.md say is so: commands parse, snippets run up to the training, names are logged ones.

Targets of `make` and relative links are checked for all documents in test_repository.py.
"""

import ast
import re
import shlex

import pytest
import yaml

from lightning_megatron_rl.rewards import compute_rewards
from lightning_megatron_rl.sample import Prompt, Sample
from tests.command_line import ROOT, build

README = (ROOT / "README.md").read_text()
METRICS = (ROOT / "docs" / "metrics.md").read_text()
NAMESPACES = "reward|reward_model|episode|preference|policy|mismatch|rollout|time|perf|moe|critic|val|test"
NAME = r"(?:[a-z0-9_]|<[a-z]+>)+"


def blocks(language: str) -> list[str]:
    """The README's code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def documented() -> set[str]:
    """The names in the first columns of the tables of docs/metrics.md."""
    return {
        name for row in re.findall(r"^\| (`[^|]+) \|", METRICS, re.MULTILINE) for name in re.findall("`([^`]+)`", row)
    }


def test_shell_commands_are_make_targets_or_parse(capsys):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line for block in blocks("bash") for line in block.splitlines() if line]
    assert len(lines) >= 5
    for line in lines:
        program, *arguments = shlex.split(line)
        if program == "make":
            assert set(arguments) <= targets, line
            continue
        assert program == "lightning-megatron-rl", f"no check knows {line!r}"
        printing = [] if "--print_config" in arguments else ["--print_config"]
        with pytest.raises(SystemExit) as exit_:
            build(*arguments, *printing)
        assert exit_.value.code == 0, line
        assert yaml.safe_load(capsys.readouterr().out)["model"]["class_path"]


def test_yaml_is_a_config(tmp_path):
    (block,) = blocks("yaml")
    (tmp_path / "config.yaml").write_text(block)
    cli = build("fit", "--config", tmp_path / "config.yaml", "--trainer.accelerator", "cpu")
    assert cli.trainer.strategy.layout.tensor_model_parallel_size == 2
    assert cli.model.sampling.max_tokens == 512
    assert cli.datamodule.template.apply_chat_template


def test_script_builds_what_it_trains():
    script, reward = blocks("python")
    tree = ast.parse(script)
    kept = [statement for statement in tree.body if ".fit(" not in ast.unparse(statement)]
    assert len(kept) == len(tree.body) - 1
    names: dict[str, object] = {}
    exec(compile(ast.Module(kept, []), "README.md", "exec"), names)
    assert {"trainer", "module", "data"} <= names.keys()

    exec(reward, names)
    prompt = Prompt(token_ids=[1], text="1+1=", answer="2", index=0, dataset="train")
    samples = [Sample(prompt, [2], [-0.1], response, "stop", 0) for response in ("2", "2" * 20)]
    compute_rewards(samples, [names["short_answers"]])
    assert [sample.rewards["short_answers"] for sample in samples] == [1.0, 0.0]


def test_code_logs_only_documented_metrics():
    package = ROOT / "lightning_megatron_rl"
    logged = set()
    for file in package.rglob("*.py"):
        text = file.read_text()
        found = re.findall(rf'(?<!`)f?"((?:{NAMESPACES})/[^"\s]+(?<!\.json))"', text)
        logged |= {re.sub(r"\{(\w+)\}", r"<\1>", name) for name in found}
        if file.parent.name in ("modules", "callbacks"):
            logged |= {f"time/{phase}_s" for phase in re.findall(r'\.phase\("(\w+)"\)', text)}
    logged -= {"time/<name>_s"}  # the phases
    logged = {re.sub("^val/gsm8k/", "val/<set>/", name) for name in logged}  # an example in a docstring
    assert {"reward/mean", "reward/<name>", "policy/loss", "mismatch/ess", "time/rollout_s"} <= logged
    assert logged <= documented(), sorted(logged - documented())


def test_documented_metrics_are_well_formed():
    names = documented()
    assert len(names) > 40
    for name in names:
        assert re.fullmatch(rf"({NAMESPACES})(/({NAME}))+", name), name
