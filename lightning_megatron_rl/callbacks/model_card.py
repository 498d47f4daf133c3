"""The model card of an export: base model, data, settings, versions and metrics of the run."""

import math
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FunctionType
from typing import Any

import yaml

from lightning_megatron_rl.utilities.masking import mask_secrets
from lightning_megatron_rl.utilities.run_settings import kept_arguments, set_fields
from lightning_megatron_rl.utilities.versions import installed_versions

_PACKAGES = ("lightning-megatron-rl", "torch", "lightning", "megatron-core", "megatron-bridge", "transformers")
_GIT_DEADLINE_S = 5.0
_LONGEST_VALUE = 200  # characters


@dataclass(frozen=True)
class RunFacts:
    """What a card says of a run."""

    base_model: str
    is_classifier: bool
    run: dict[str, str]  # method, data, step, layout, versions, ...
    settings: dict[str, str]
    metrics: dict[str, float]


def describe_run(module: Any, proof: str) -> RunFacts:
    """Collect the facts of the module's run.

    Args:
        module: A `ModelModule` in a Trainer.
        proof: What was compared.
    """
    trainer = module.trainer
    data = trainer.datamodule
    run = {
        "base model": module.hf_model.name_or_path,
        "method": type(module).__name__,
        "data": "given to the Trainer as data loaders" if data is None else describe_data(data),
        "step": f"{trainer.global_step} (epoch {trainer.current_epoch})",
        "precision": str(trainer.precision),
        "layout": f"{module.strategy.layout.describe(trainer.world_size)}, {trainer.world_size} processes",
        "versions": ", ".join(f"{name} {found}" for name, found in installed_versions(_PACKAGES).items()),
        "git commit": (git_commit(Path.cwd()) or "none") if trainer.is_global_zero else "",  # its rank writes the card
        "exported": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "verified": proof,
    }
    if module.train_settings.lora is not None:
        run["adapters"] = module.train_settings.lora.describe()
    # not the x axis
    metrics = {name: float(value) for name, value in sorted(trainer.callback_metrics.items()) if "/" in name}
    return RunFacts(
        module.hf_model.name_or_path,
        module.exports_classifier,
        run,
        plain_settings(module),
        metrics,
    )


def describe_data(data: Any) -> str:
    """Return a data module's class, and the sources that it has."""
    settings = plain_settings(data)
    named = {name: repr(value) for name, value in vars(data).items() if name in ("train_source", "val_sources")}
    listed = ", ".join(f"{name}={_short(value)}" for name, value in {**named, **settings}.items())
    return f"{type(data).__name__}: {listed}" if listed else type(data).__name__


def plain_settings(owner: Any) -> dict[str, str]:
    """Return what an object keeps of the arguments it was made with.

    Numbers, texts, functions, lists of them, and the fields of dataclasses; see `run_settings`.

    Args:
        owner: Module or data module.
    """
    found: dict[str, str] = {}
    for name, value in kept_arguments(owner).items():
        for key, item in _leaves(name, value):
            text = _text(mask_secrets({key: item})[key])
            if text is not None:
                found[key] = _short(text)
    return dict(sorted(found.items()))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a setting, or those inside it: ``train_settings.optimizer.lr``."""
    inner = _items(value)
    if not inner:
        yield name, value
    for key, item in inner.items():
        yield from _leaves(f"{name}.{key}", item)


def _items(value: Any) -> dict[str, Any]:
    """The fields of a dataclass or the entries of a mapping."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    return set_fields(value) if is_dataclass(value) and not isinstance(value, type) else {}


def _text(value: Any) -> str | None:
    """A number, text, function, or list of them as text; None for anything else."""
    if isinstance(value, bool | int | float | str):
        return str(value)
    if isinstance(value, FunctionType | type):
        return value.__qualname__
    if isinstance(value, list | tuple):
        texts = [_text(item) for item in value]
        return f"[{', '.join(text for text in texts if text)}]" if texts and all(texts) else None
    return None


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def git_commit(directory: Path) -> str | None:
    """Return the commit that is checked out in a directory, and whether files differ from it; None outside of git."""
    answers = []
    for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=directory, capture_output=True, text=True, timeout=_GIT_DEADLINE_S
            )
        except (OSError, subprocess.TimeoutExpired):  # no git, or a file system too slow for it
            return None
        if done.returncode != 0:
            return None
        answers.append(done.stdout.strip())
    return f"{answers[0]} with local changes" if answers[1] else answers[0]


def write_card(directory: Path, facts: RunFacts, *, adapter: bool) -> None:
    """Write README.md, as the hub shows it."""
    (directory / "README.md").write_text(format_card(facts, adapter=adapter))


def format_card(facts: RunFacts, *, adapter: bool) -> str:
    """Return the card: the hub's fields in YAML, and tables.

    Args:
        facts: Of the run.
        adapter: The directory holds adapters in PEFT's format.
    """
    fields = {
        "base_model": facts.base_model,
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-classification" if facts.is_classifier else "text-generation",
        "tags": ["lightning-megatron-rl", facts.run["method"]],
    }
    loader = "AutoModelForSequenceClassification" if facts.is_classifier else "AutoModelForCausalLM"
    what = "Adapters (LoRA) in PEFT's format" if adapter else f"Loads with Transformers' `{loader}`"
    kind = "reward model" if facts.is_classifier else "language model"
    parts = [
        f"---\n{yaml.safe_dump(fields, sort_keys=False)}---\n",
        f"# {kind.capitalize()} trained from {facts.base_model}\n",
        f"{what}. Trained by {facts.run['method']} of lightning-megatron-rl; what this model may be used for is a"
        " matter of the base model's license and of the data.\n",
        "## Run\n",
        _table("", "", facts.run),
        "## Hyper-parameters\n",
        _table("setting", "value", facts.settings),
        "## Metrics at export\n",
        _table("metric", "value", {name: _number(value) for name, value in facts.metrics.items()}),
    ]
    return "\n".join(parts)


def _number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else str(value)


def _table(left: str, right: str, rows: Mapping[str, str]) -> str:
    escaped = [(name, value.replace("|", "\\|").replace("\n", " ")) for name, value in rows.items()]
    return "\n".join([f"| {left} | {right} |", "|---|---|", *(f"| {name} | {value} |" for name, value in escaped), ""])
