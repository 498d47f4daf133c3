"""The command `init`: a recipe that parses and fits, and what it refuses."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from lightning_megatron_rl.models.published import raw_config
from lightning_megatron_rl.plan.command import main as plan
from lightning_megatron_rl.recipes.init import main
from lightning_megatron_rl.recipes.text import MARK


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Lightning sets variables when it is imported."""
    with patch.dict(os.environ):
        yield


def test_recipe_fits_the_gpus_that_it_is_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of a model that is a directory, with a data set that is named."""
    model, file = tmp_path / "it's: own, #1", tmp_path / "recipes" / "recipe.yaml"  # which YAML reads otherwise
    model.mkdir()
    (model / "config.json").write_text(json.dumps(raw_config("qwen3-4b")))
    arguments = ["--model", str(model), "--data", "gsm8k", "--device", "h200", "--devices", "2", "--out", str(file)]
    assert main([*arguments, "--method", "grpo_lora"]) == 0
    written = yaml.safe_load(file.read_text())
    assert written["trainer"]["devices"] == 2
    places = [written["trainer"]["logger"], *written["trainer"]["callbacks"]]
    assert [it["init_args"].get("save_dir") or it["init_args"]["dirpath"] for it in places] == [
        f"runs/{model.name}/grpo_lora{end}" for end in ("", "/checkpoints", "/hf", "/samples")
    ]
    assert written["model"]["init_args"]["model"] == written["data"]["init_args"]["tokenizer"] == str(model)
    assert written["model"]["init_args"]["train"]["lora"]["rank"] == 16
    assert written["data"]["init_args"]["train"]["path"] == "openai/gsm8k"
    capsys.readouterr()
    assert plan(["--config", str(file), "--device", "h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (stated,) = re.findall(rf"^{MARK}([\d.]+) of [\d.]+ GiB", file.read_text(), re.MULTILINE)
    assert found["needed_gib"] == pytest.approx(float(stated), abs=0.06)
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "there is such a file" in capsys.readouterr().err


def test_nodes_have_the_gpus_that_were_given(capsys: pytest.CaptureFixture[str]):
    assert main(["--model", "Qwen/Qwen3-8B", "--device", "h200", "--devices", "4", "--nodes", "2"]) == 0
    text = capsys.readouterr().out
    assert f"{MARK}--device h200 --devices 4 --nodes 2" in text
    trainer = yaml.safe_load(text)["trainer"]
    assert (trainer["devices"], trainer["num_nodes"]) == (4, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "qwen3-8c"], "unknown model 'qwen3-8c'.*nearest: qwen3-8b"),
        (["--model", "qwen3-8b", "--data", "gsm9k"], "unknown data set 'gsm9k'; nearest: gsm8k"),
        (["--model", "qwen3-8b", "--device", "h300"], "unknown device 'h300'; nearest: h[12]00"),
        (["--model", "qwen3-8b", "--data", "ultrachat-200k"], "ultrachat_200k is not for grpo: it has no answers"),
        (["--model", "qwen3-8b", "--nodes", "0"], "--nodes 0: it is a number, at least 1"),
        (
            ["--model", "qwen3-8b", "--out", f"{__file__}/x.yaml"],
            r"--out=.*test_init.py' cannot be written: .* directory",
        ),
        (["--model", "qwen3-8b", "--out", "."], r"--out \. is a directory: name a file"),
        (
            ["--model", "llama-3.1-70b", "--method", "sft", "--devices", "1"],
            r"does not fit 1 x h100 in any layout: .* Smallest change that fits: ",
        ),
        (
            ["--model", "llama-3.1-70b", "--devices", "1", "--nodes", "8"],
            r"divides over 8 x h100, but no sampler has room on the 1 GPU\(s\) of a node: the sampler's cache holds 0"
            r" tokens, .* weights take 131\.4 GiB on each of 1 GPU\(s\)",
        ),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
