"""Guides of the site: commands parse, YAML is a config, Python builds; migration tables name settings that exist."""

import ast
import dataclasses
import inspect
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

import lightning_megatron_rl
from lightning_megatron_rl import GRPOModule, PromptDataModule, Sample, VLLMEngine
from lightning_megatron_rl.__main__ import main
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.training import TrainingSettings
from lightning_megatron_rl.rollout.protocol import SamplingParams
from scripts import reference_pages
from scripts.docs_lengths import sentence_lengths
from scripts.notebook_pages import NOTEBOOKS
from tests.command_line import ROOT, build

DOCS = ROOT / "docs"
GUIDES = [
    DOCS / name
    for name in ("index.md", "quickstart.md", "gsm8k.md", "glossary.md", "callbacks.md")
] + sorted([*(DOCS / "how_to").glob("*.md"), *(DOCS / "migration").glob("*.md")])  # fmt: skip
DEMO = ROOT / "configs" / "demo" / "grpo.yaml"
IDS = [page.relative_to(DOCS).as_posix() for page in GUIDES]
TOOLS = {"report", "plan", "doctor", "verify-layout"}  # each has tests of its own; their options are looked up here
OTHERS = sorted(set(DOCS.rglob("*.md")) - set(GUIDES))
NOT_RUN = {
    "uv": "installs",
    "pip": "installs",
    "venv/bin/pip": "installs",
    "python3.12": "installs",
    "docker": "builds images",
    "chmod": "of the shell",
    "grep": "reads a file of requirements",
    "make": "test_readme looks up targets",
    "GPU=1": "installs for a GPU",
    "srun": "needs Slurm",
    "venv/bin/python": "needs the environment that was just made",
}
MOST_WORDS, MOST_PER_SENTENCE = 1500, 20


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def write_python(page: Path, folder: Path) -> None:
    """Write the page's Python under the names that it gives it."""
    text = page.read_text()
    for name, code in re.findall(r"`(my_\w+\.py)`:\n\n```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(code)


@pytest.mark.parametrize("page", GUIDES, ids=IDS)
def test_blocks_are_of_languages_that_are_checked(page: Path):
    fences = re.findall(r"^```(\w*)$", page.read_text(), re.MULTILINE)
    assert {fence for fence in fences if fence} <= {"bash", "python", "yaml", "text"}
    assert "text" not in fences or page.parent.name == "migration"  # what belongs to another library


@pytest.mark.parametrize("page", [page for page in GUIDES if blocks(page, "bash") or blocks(page, "yaml")], ids=str)
def test_commands_and_configs_parse(page: Path, tmp_path: Path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("my_")]:  # the page before may have one of this name
        del sys.modules[name]
    write_python(page, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "extending"))
    overlays = blocks(page, "yaml")
    assert len(overlays) <= 1
    if overlays:
        (tmp_path / "mine.yaml").write_text(overlays[0])
    commands = [line for block in blocks(page, "bash") for line in block.splitlines()]
    if overlays and not commands:
        commands = [f"lightning-megatron-rl fit --config {DEMO} --config mine.yaml"]
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands:
        words = [word for word in shlex.split(line) if not re.match("[A-Z]+=", word)]
        if words[0] == "make":
            assert set(words[1:]) <= targets, line
        elif words[0] == "python":
            assert (tmp_path / words[1]).exists(), line
        elif words[0] == "export":
            assert all(re.match("[A-Z_]+=", word) for word in words[1:]), line
        elif words[0] == "source":
            assert words == ["source", ".venv/bin/activate"]
        elif words[1] in TOOLS:
            source = "".join(file.read_text() for file in (ROOT / "lightning_megatron_rl").rglob("*.py"))
            options = [word for word in words[1:] if word.startswith("--") and not word.startswith("--model.")]
            assert all(f'"{word}"' in source for word in options), line
            assert all((ROOT / word).exists() for word in words if word.endswith(".yaml")), line
        else:
            assert words[:2] == ["lightning-megatron-rl", "fit"], f"no check knows {line!r}"
            arguments = [str(tmp_path / word) if word == "mine.yaml" else word for word in words[1:]]
            # a checkpoint to resume from is there after a run alone, and what --shrink makes is tests/recipes'
            arguments = [word for word in arguments if word not in ("--shrink", "--ckpt_path", "last")]
            if "configs/demo/grpo.yaml" in words:
                assert build(*arguments).model.num_generations
            else:  # for GPUs
                with pytest.raises(SystemExit) as exit_:
                    build(*arguments, "--print_config")
                assert exit_.value.code == 0, line
                assert yaml.safe_load(capsys.readouterr().out)["model"]["class_path"]


def overlay_parses(folder: Path, block: str) -> None:
    (folder / "overlay.yaml").write_text(block)
    with pytest.raises(SystemExit) as exit_:
        build("fit", "--config", DEMO, "--config", folder / "overlay.yaml", "--print_config")
    assert exit_.value.code == 0, block


@pytest.mark.parametrize("page", [page for page in OTHERS if blocks(page, "yaml")], ids=lambda page: page.name)
def test_yaml_of_every_other_page_is_an_overlay(page: Path, tmp_path: Path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]
    for name, code in re.findall(r"^```python\n# (my_\w+\.py)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    for block in blocks(page, "yaml"):
        overlay_parses(tmp_path, block)


@pytest.mark.parametrize("page", [page for page in OTHERS if blocks(page, "bash")], ids=lambda page: page.name)
def test_commands_of_every_other_page_are_known(page: Path):
    source = "".join(file.read_text() for file in (ROOT / "lightning_megatron_rl").rglob("*.py"))
    for line in "".join(blocks(page, "bash")).splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] == "lightning-megatron-rl":
            options = [word for word in words[1:] if word.startswith("--")]
            if words[1] == "fit":
                with pytest.raises(SystemExit) as exit_:
                    build(*[word for word in words[1:] if word != "--shrink"], "--print_config")
                assert exit_.value.code == 0, line
            else:
                known = all(f'"{word}"' in source or word == "--print_completion" for word in options)
                assert words[1] == "--print_completion" or (known and f'"{words[1]}"' in source), line
        elif words and (words := [word for word in words if not re.match("[A-Z]+=", word)])[0].endswith("torchrun.sh"):
            assert (ROOT / words[0]).exists()
            with pytest.raises(SystemExit) as exit_:
                build("fit", *words[1:], "--print_config")
            assert exit_.value.code == 0, line
        elif words[:2] == ["python", "-c"]:
            exec(compile(words[2], page.name, "exec"), {})
        else:
            assert not words or words[0] in NOT_RUN, f"no check knows {line!r}"


CHEAP = ("plan", "init", "report", "doctor", "schema", "--print_completion")  # seconds at most: run as they stand
COMMANDS = sorted(
    {
        line.partition(" #")[0].strip()
        for page in [ROOT / "README.md", *DOCS.rglob("*.md")]
        for line in "".join(blocks(page, "bash")).splitlines()
        if line.startswith("lightning-megatron-rl ") and line.split()[1] != "fit"
    }
)


def run_command(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Run a command in this process; return its exit code, and what it prints and writes where it says."""
    words, _, file = command.partition(" > ")
    with patch.dict(os.environ):  # a command is its process's only one, and sets variables
        try:
            main(shlex.split(words)[1:])
            code: object = 0
        except SystemExit as exit_:
            code = exit_.code or 0
    captured = capsys.readouterr()
    return code, captured.out + captured.err if code or not file else captured.out


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.split()[1] in CHEAP])
def test_cheap_commands_do_what_the_page_says(command: str, tmp_path: Path, monkeypatch, capsys):
    """In an empty directory but for two runs, as an installed package has them."""
    for name in ("demo/grpo", "demo/own_loss", "other"):
        shutil.copytree(NOTEBOOKS / "demo_run", tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-megatron-rl"])
    code, said = run_command(command, capsys)
    assert code in ((0, 1) if " doctor" in command else (0,)), said  # 1: this machine lacks something
    words = command.split()
    if "--out" in words:
        assert (tmp_path / words[words.index("--out") + 1]).stat().st_size
    elif words[1] == "report":
        assert (tmp_path / words[2] / "report.html").stat().st_size
    elif "--json" in words or words[1] == "schema":
        assert json.loads(said)
    else:
        assert said.strip()


@pytest.mark.parametrize("tool", sorted({command.split()[1] for command in COMMANDS} - set(CHEAP)))
def test_options_of_other_commands_are_in_their_help(tool: str, capsys):
    code, helped = run_command(f"lightning-megatron-rl {tool} --help", capsys)
    assert code == 0
    options = {
        word for command in COMMANDS if command.split()[1] == tool for word in command.split() if word[:2] == "--"
    }
    assert {option for option in options if option.partition(".")[0] not in ("--model", "--config")} <= set(
        re.findall(r"--[\w-]+", helped)
    )


OF_NOTEBOOKS = {path.stem for path in NOTEBOOKS.glob("*.ipynb")}  # tests/test_notebooks.py runs these
WITH_PYTHON = [page for page in DOCS.rglob("*.md") if blocks(page, "python") and page.stem not in OF_NOTEBOOKS]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=str)
def test_python_defines_what_it_says(page: Path):
    for block in blocks(page, "python"):
        if block.startswith("# not run here: "):  # with the reason
            ast.parse(block)
            continue
        names: dict[str, object] = {}
        exec(compile(block, page.name, "exec"), names)
        assert any(callable(value) for value in names.values())


REFERENCE = {"settings", "cli", "api", "algorithms", "models", "lightning", "metrics", "results", "private_apis"}


def test_pages_are_short_and_so_are_their_sentences():
    every = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        sentences = sentence_lengths(text)
        every += sentences
        assert page.stem in REFERENCE or len(text.split()) <= MOST_WORDS, page
        mean = sum(sentences) / max(len(sentences), 1)
        assert mean <= MOST_PER_SENTENCE, f"{page}: {mean:.1f} words a sentence"
    assert sum(every) / len(every) <= 13


@pytest.mark.parametrize("name", sorted(reference_pages.PAGES))
def test_reference_says_what_the_code_says(name: str, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-megatron-rl"])
    page = reference_pages.PAGES[name]()
    assert (DOCS / name).read_text() == page, "python scripts/reference_pages.py writes it"
    if name == "settings.md":
        assert not re.findall(r"^.*\|  \|$", page, re.MULTILINE), "a setting has no line in its docstring"
        assert {"### `DynamicSampling`", "### `LoRASettings`"} <= set(re.findall(r"^### `\w+`", page, re.MULTILINE))


OURS = {
    "loss": {field.name for field in dataclasses.fields(GRPOLossConfig)},
    "sampling": {field.name for field in dataclasses.fields(SamplingParams)},
    "train": {field.name for field in dataclasses.fields(TrainingSettings)},
    "engine": set(inspect.signature(VLLMEngine.__init__).parameters),
    "data": set(inspect.signature(PromptDataModule.__init__).parameters),
}


@pytest.mark.parametrize("name", ["nemo_rl", "openrlhf", "oumi", "trl", "verl"])
def test_tables_name_settings_that_are_here(name: str):
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \|", (DOCS / "migration" / f"{name}.md").read_text(), re.MULTILINE)
    paths = [path for row in rows for path in re.findall(r"`(\w+)\.(\w+)", row) if path[0] in OURS]
    assert len(paths) >= (4 if name == "oumi" else 15)
    for owner, setting in paths:
        assert setting in OURS[owner], f"{owner}.{setting}"
    module = inspect.signature(GRPOModule.__init__).parameters
    assert {"overlong", "num_generations", "updates_per_rollout", "reward_weights", "validation_sampling"} <= set(
        module
    )


def of_peers(package: str, file: str) -> str:
    """Text of a file of a package that benchmarks compare with."""
    path = ROOT / ".peers" / package / file
    if not path.exists():
        pytest.skip(f"{package} is not installed: `make peers`")
    return path.read_text()


def test_trl_has_the_settings_of_its_table():
    tree = ast.parse(of_peers("trl", "trainer/grpo_config.py"))
    from transformers import TrainingArguments

    theirs = {node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    theirs |= {field.name for field in dataclasses.fields(TrainingArguments)}
    text = (DOCS / "migration" / "trl.md").read_text()
    named = {name for row in re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    example = next(block for block in re.findall(r"GRPOConfig\((.*?)\n\)", text, re.DOTALL))
    named |= set(re.findall(r"(\w+)=", example))
    assert len(named) > 30
    assert named <= theirs, sorted(named - theirs)


def test_trl_has_the_defaults_of_its_table():
    tree = ast.parse(of_peers("trl", "trainer/grpo_config.py"))
    fields = [node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call)]
    defaults = {
        field.target.id: ast.literal_eval(word.value)  # type: ignore[union-attr]
        for field in fields
        for word in field.value.keywords  # type: ignore[union-attr]
        if word.arg == "default"
    }
    assert defaults["use_bias_correction_kl"] is defaults["vllm_importance_sampling_correction"] is True
    assert defaults["vllm_importance_sampling_mode"] == "sequence_mask"
    assert (defaults["vllm_importance_sampling_clip_min"], defaults["vllm_importance_sampling_clip_max"]) == (None, 3.0)
    assert defaults["delta"] is None
    (block,) = blocks(DOCS / "migration" / "trl.md", "yaml")
    loss = yaml.safe_load(block)["model"]["init_args"]["loss"]
    assert loss["kl_importance_weighting"] is True
    assert (loss["correction"], loss["correction_level"]) == ("icepop", "sequence")
    assert (loss["icepop_low"], loss["icepop_high"]) == (0.0, 3.0)


@pytest.mark.parametrize("name", ["nemo_rl", "openrlhf", "trl", "verl"])
def test_examples_of_migration_set_what_has_another_default_here(name: str):
    (block,) = blocks(DOCS / "migration" / f"{name}.md", "yaml")
    settings = yaml.safe_load(block)["model"]["init_args"]
    assert "weight_decay" in settings["train"]["optimizer"]  # 0.01 here
    assert "correction" in settings["loss"]  # tis here


def test_verl_has_the_settings_of_its_table():
    theirs = yaml.safe_load(of_peers("verl", "trainer/config/_generated_ppo_megatron_trainer.yaml"))
    named = 0
    for row in re.findall(r"^\| (`[^|]+) \|", (DOCS / "migration" / "verl.md").read_text(), re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([\w.]+)", row):
            full = name if "." in name else f"{folder}.{name}"  # the second of a row is the first's neighbour
            folder = full.rpartition(".")[0]
            place = theirs
            for part in (f"actor_rollout_ref.{full}" if full.startswith(("actor.", "rollout.")) else full).split("."):
                assert part in place, f"{name} is no setting of verl"
                place = place[part]
            named += 1
    assert named > 30


def test_api_page_has_every_public_name():
    written = set(re.findall(r"^::: [\w.]+\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE))
    assert set(lightning_megatron_rl.__all__) <= written


def test_callbacks_page_names_attributes_that_samples_have():
    text = (DOCS / "callbacks.md").read_text()
    table = text[text.index("| attribute of `Sample`") : text.index("Read them")]
    first = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    names = {name for cell in first for name in re.findall(r"`(\w+)`", cell)}
    assert len(names) > 10
    has = {field.name for field in dataclasses.fields(Sample)} | {"response_mask"}
    assert names <= has, sorted(names - has)


def test_speed_of_streams_is_that_of_the_result_file():
    rows = json.loads((ROOT / "benchmarks" / "results" / "long_tail_h200.json").read_text())["rows"]
    kept = [row for row in rows if row["max_staleness"] and row["on_update"] == "kept"]
    said = "1, 2 and 4 with `kept` give {:.2f}, {:.2f}, {:.2f} times the speed".format(
        *(row["speedup"] for row in kept)
    )
    assert said in (DOCS / "asynchronous.md").read_text()


@pytest.mark.parametrize("config", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_checkpoints_are_found_by_last(config: Path):
    """docs/how_to/resume.md says so."""
    callbacks = (yaml.safe_load(config.read_text()).get("trainer") or {}).get("callbacks") or []
    for callback in callbacks:
        if isinstance(callback, dict) and callback["class_path"].endswith(".ModelCheckpoint"):
            assert callback["init_args"]["save_last"] == "link"
