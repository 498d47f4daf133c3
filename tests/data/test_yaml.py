"""What a user writes in YAML, through the parser that LightningCLI uses."""

from pathlib import Path

import lightning as L
import pytest
from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_megatron_rl.data import ArithmeticRows, DataSource, PromptDataModule, SFTDataModule
from tests.data.test_sources import some_rows

SOURCES = f"""
class_path: {{module}}
init_args:
  tokenizer: dir
  batch_size: 8
  train:
    class_path: lightning_megatron_rl.data.ArithmeticRows
    init_args: {{{{split: train, size: 64, min_carry_share: 1.0}}}}
  val:
    gsm8k: {{{{path: openai/gsm8k, name: main, split: test, limit: 500}}}}
    file: held_out.jsonl
    function: {some_rows.__module__}.some_rows
"""


def parse(yaml: str, directory: Path) -> L.LightningDataModule:
    """The data module of a config file with the given `data` section."""
    (directory / "config.yaml").write_text("data:" + yaml.replace("\n", "\n  "))
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_lightning_class_args(L.LightningDataModule, "data", subclass_mode=True)
    return parser.instantiate(parser.parse_args([f"--config={directory / 'config.yaml'}"]))["data"]


@pytest.mark.parametrize("module", [PromptDataModule, SFTDataModule])
def test_every_form_of_source(module: type, tmp_path: Path):
    for name in (module.__name__, f"lightning_megatron_rl.data.{module.__name__}"):
        data = parse(SOURCES.format(module=name), tmp_path)
        assert type(data) is module
        assert isinstance(data.train_source, ArithmeticRows)
        assert len(data.train_source()) == 64
        assert data.val_sources == {
            "gsm8k": DataSource("openai/gsm8k", name="main", split="test", limit=500),
            "file": "held_out.jsonl",
            "function": some_rows,
        }


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("batch_sise", "batch_size"), ("min_cary_share", "min_carry_share"), ("splt: test", "split: test")],
)
@pytest.mark.parametrize("module", ["PromptDataModule", "SFTDataModule"])
def test_typos_are_refused(module: str, wrong: str, right: str, tmp_path: Path):
    yaml = SOURCES.format(module=module)
    assert right in yaml
    with pytest.raises(ArgumentError, match=wrong.partition(":")[0]):
        parse(yaml.replace(right, wrong), tmp_path)


def test_wrong_types_are_refused(tmp_path: Path):
    yaml = SOURCES.format(module="PromptDataModule")
    for wrong in ("\n  on_long_prompt: keep\n", "\n  max_prompt_length: long\n", "\n  val_batch_size: 1.5\n"):
        with pytest.raises(ArgumentError, match=wrong.strip().partition(":")[0]):
            parse(yaml.rstrip("\n") + wrong, tmp_path)


def test_cli_help_shows_the_arguments(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        LightningCLI(L.LightningModule, args=["fit", "--data.help=PromptDataModule"], subclass_mode_model=True)
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Prompts per rollout, over all ranks." in text
    assert "--data.answer_marker" in text
