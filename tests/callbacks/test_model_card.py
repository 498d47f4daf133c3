"""The card's parts by themselves; tests/callbacks/test_hf_export.py has one of a run."""

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron_rl.callbacks.model_card import RunFacts, format_card, git_commit, plain_settings
from lightning_megatron_rl.models.layers.lora import LoRASettings


@dataclass
class Foreign:
    """A dataclass of another package."""

    lr: float | None = None
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])


class Owner:
    """Keeps arguments under their names or longer ones, and has a state."""

    def __init__(self, size: int, optimizer: Any, lora: Any, reward: Any, hidden: int, rows: list[Any]) -> None:
        self.size, self.optimizer_config, self.lora, self.rewards = size, optimizer, lora, [reward]
        self._hidden, self.rows, self.step = hidden, rows, 3
        self.reward_names = ["a", "b"]


class Child(Owner):
    """Has arguments of its own besides its parent's."""

    def __init__(self, depth: float, **options: Any) -> None:
        super().__init__(**options)
        self.depth = depth


def length(text: str) -> float:
    return float(len(text))


def test_settings_are_arguments_and_no_state():
    lora = LoRASettings(rank=4)
    owner = Child(0.5, size=2, optimizer=Foreign(lr=1e-3), lora=lora, reward=length, hidden=1, rows=[object()])
    settings = plain_settings(owner)
    assert settings["lora.rank"] == "4"
    assert settings["lora.target_modules"] == "[linear_qkv, linear_proj, linear_fc1, linear_fc2]"
    others = {name: text for name, text in settings.items() if not name.startswith("lora.")}
    assert others == {
        "depth": "0.5",
        "optimizer_config.lr": "0.001",
        "reward_names": "[a, b]",
        "size": "2",
    }, "defaults of other packages' dataclasses, lists of objects and private names are left out"


def test_card_is_valid_markdown_and_yaml():
    run = {"method": "GRPOModule", "data": "a|b\nc"}
    facts = RunFacts("Qwen/Qwen3-0.6B", False, run, {"size": "2"}, {"reward/mean": 0.123456789, "x": float("nan")})
    card = format_card(facts, adapter=False)
    assert card.startswith("---\nbase_model: Qwen/Qwen3-0.6B\nlibrary_name: transformers\n")
    assert "| data | a\\|b c |" in card
    assert "| reward/mean | 0.123457 |" in card
    assert "| x | nan |" in card
    classifier = format_card(RunFacts("x", True, run, {}, {}), adapter=False)
    assert "pipeline_tag: text-classification" in classifier
    assert "AutoModelForSequenceClassification" in classifier


def test_commit_is_that_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit(tmp_path) is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=30
        )
        return done.stdout.strip()

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    assert git_commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == f"{git('rev-parse', 'HEAD')} with local changes"
