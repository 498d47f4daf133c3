"""`lightning-megatron-rl verify-layout`: the user's own YAML in, table, JSON and exit code out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lightning_megatron_rl.__main__ import main as program
from lightning_megatron_rl.verify.command import main
from lightning_megatron_rl.verify.config import FromConfig
from lightning_megatron_rl.verify.layouts import parse_layout
from tests.command_line import ROOT, changed
from tests.verify.test_batch import recording

SFT, GRPO = ROOT / "configs" / "demo" / "sft.yaml", ROOT / "configs" / "demo" / "grpo.yaml"


def small(model: Path, directory: Path, source: Path = SFT) -> Path:
    """The demo's config for `model`, writing to `directory` if it wrote anything."""
    config = yaml.safe_load(source.read_text())
    config["model"]["init_args"]["model"] = config["data"]["init_args"]["tokenizer"] = str(model)
    text = yaml.safe_dump(config).replace("runs/demo", str(directory / "runs"))
    (directory / "config.yaml").write_text(text)
    return directory / "config.yaml"


@pytest.mark.slow
def test_right_config_passes_and_the_report_is_written(qwen3_dir, tmp_path, capsys):
    config = small(qwen3_dir, tmp_path)
    out = tmp_path / "report.json"
    arguments = ["--config", str(config), "--layouts", "microbatches,dp2", "--processes", "2", "--out", str(out)]
    with pytest.raises(SystemExit) as exit_:
        program(["verify-layout", *arguments])
    shown = capsys.readouterr().out
    assert exit_.value.code == 0, shown
    assert "2 layouts give the numbers of one process (tolerance 1e-05)" in shown
    report = json.loads(out.read_text())
    assert report["ok"]
    assert report["environment"]["command"].startswith("lightning-megatron-rl verify-layout --config ")
    assert report["environment"]["torch"] == torch.__version__
    assert "CPU cores" in report["environment"]["machine"]
    assert [row["layout"] for row in report["rows"]] == ["single", "microbatches", "dp2"]
    assert report["rows"][2]["weight_error"] < 1e-5
    assert shown.count("\ndp2 ") == 1
    assert not (tmp_path / "runs").exists(), "callbacks and loggers of the config do not run"


@pytest.mark.slow
def test_users_own_wrong_module_is_caught(qwen3_dir, tmp_path, capsys):
    config = changed(
        small(qwen3_dir, tmp_path), tmp_path / "c.yaml", "model.class_path", "tests.verify.subjects.LocalMeanSFT"
    )
    code = main(["--config", str(config), "--layouts", "microbatches", "--processes", "1", "--steps", "1"])
    shown = capsys.readouterr().out
    assert code == 1
    assert "LocalMeanSFT(" in shown
    assert "NOT THE SAME  microbatches: departs: step 1: loss" in shown
    assert "model.embed_tokens.weight departs by" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layouts", "tp2,tp8"], "layout tp8: 8 processes > processes=4"),
        (["--layouts", "tp2x"], "unknown layout 'tp2x': 'tp2x' is no part of a layout; parts of a name"),
        (["--processes", "two"], "argument --processes: invalid int value: 'two'"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--batch", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--layoutz=tp2"], "verify-layout: error: unknown option --layoutz; did you mean --layouts?"),
        (["--model.init_args.train.packin", "true"], "unknown key model.train.packin; did you mean packing?"),
        (["--trainer.strategy", "ddp"], "trainer.strategy=ddp: verify-layout compares layouts of MegatronStrategy"),
        (["--model", "lightning.pytorch.demos.boring_classes.BoringModel"], "BoringModel is no PolicyModule"),
        (["--out", "."], "--out . is a directory: name a file"),
        (["--out", f"{__file__}/report.json"], "test_command.py' cannot be written"),
        (["--model.train.max_tokens_per_microbatch", "0"], "max_tokens_per_microbatch=0"),
    ],
)
def test_arguments_that_cannot_be_are_refused_in_a_line(qwen3_dir, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        main(["--config", str(small(qwen3_dir, tmp_path)), *arguments])
    shown = capsys.readouterr().err
    assert exit_.value.code == 2
    assert message in shown
    assert "Traceback" not in shown


def test_a_module_of_pairs_is_refused_in_a_line(qwen3_dir, tmp_path, capsys):
    config = changed(
        small(qwen3_dir, tmp_path), tmp_path / "c.yaml", "model.class_path", "lightning_megatron_rl.DPOModule"
    )
    with pytest.raises(SystemExit) as exit_:
        main(["--config", str(config), "--layouts", "microbatches", "--processes", "1"])
    shown = capsys.readouterr().err
    assert exit_.value.code == 2
    assert "DPOModule trains on preference pairs" in shown
    assert "Traceback" not in shown


def test_malformed_batch_is_refused_with_its_line(qwen3_dir, tmp_path, capsys):
    path = recording(tmp_path / "r.jsonl", prompts=1, responses=2)
    path.write_text(path.read_text() + "{\n")
    with pytest.raises(SystemExit) as exit_:
        main(["--config", str(small(qwen3_dir, tmp_path, GRPO)), "--batch", str(path)])
    assert exit_.value.code == 2
    assert "r.jsonl, line 3: not valid JSON" in capsys.readouterr().err


def test_config_is_built_with_the_layout_in_place_of_its_own(qwen3_dir, tmp_path):
    config = small(qwen3_dir, tmp_path, GRPO)  # says tensor_model_parallel_size: 2
    environment = dict(os.environ)
    subject = FromConfig(["--config", str(config)])(parse_layout("pp2_cp2").strategy)
    assert dict(os.environ) == environment
    assert subject.strategy.layout.tensor_model_parallel_size == 1
    assert subject.strategy.layout.pipeline_model_parallel_size == 2
    assert not subject.strategy.layout.sequence_parallel
    assert subject.strategy.use_distributed_optimizer
    assert subject.trainer["gradient_clip_val"] == 1.0
    assert subject.module.train_settings.optimizer is not None
    assert subject.module.train_settings.optimizer.adam_beta2 == 0.98
    by_name = FromConfig(["--config", str(changed(config, tmp_path / "n.yaml", "trainer.strategy", "megatron"))])
    assert by_name(parse_layout("tp2").strategy).strategy.layout.tensor_model_parallel_size == 2


def test_help_is_light():
    script = (
        "import sys; from lightning_megatron_rl.__main__ import main\n"
        "try: main(['verify-layout', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'lightning', 'jsonargparse'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", script]
    shown = subprocess.run(command, cwd=ROOT, check=True, timeout=180, capture_output=True, text=True).stdout
    assert "--layouts" in shown
    assert "exit code" in shown
