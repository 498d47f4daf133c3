"""Configs of published models, for plans and recipes where neither a model directory nor a hub can be reached.

`published.json` holds what the config.json of each model on the Hugging Face hub says of its architecture (special
tokens left out), and the number of parameters that its model card or the index of its weights states, by which the
sizes are tested. DeepSeek-V3's is without the layer of multi-token prediction.
"""

import difflib
import json
from functools import cache
from pathlib import Path
from typing import Any

from lightning_megatron_rl.models.families.refused import refuse_architectures
from lightning_megatron_rl.utilities.text_files import read_json, user_path

_FILE = Path(__file__).with_name("published.json")


@cache
def _table() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(_FILE.read_text())
    return found


def published_names() -> list[str]:
    """Return the hub names of all models in the table."""
    return [name for entry in _table().values() for name in entry["names"]]


def recipe_names() -> list[str]:
    """Return the short names, by which recipes are filed."""
    return list(_table())


def short_name(name: str) -> str | None:
    """Return the short name of a published model; None if it is none of the table.

    Example:
        ``short_name("Qwen/Qwen3-0.6B") == "qwen3-0.6b"``
    """
    return next((short for short, entry in _table().items() if name in (short, *entry["names"])), None)


def hub_name(short: str) -> str:
    """Return the hub name that stands for a short name: of an instructed model, where there is one."""
    return str(_table()[short]["names"][0])


def stated_parameters(short: str) -> int:
    """Return the parameters that are stated of a model."""
    return int(_table()[short]["parameters"])


def raw_config(name: str) -> dict[str, Any]:
    """Return the content of a model's config.json: a directory's own, else that of the table.

    Args:
        name: Directory, hub name or short name.

    Raises:
        ValueError: It is neither, with the nearest names.
    """
    path = user_path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"model directory {path} has no config.json: give the directory that `save_pretrained` wrote"
            )
        found: dict[str, Any] = read_json(path / "config.json")
        return found
    short = short_name(name)
    if short is not None:
        return dict(_table()[short]["config"])
    known = [*published_names(), *recipe_names()]
    lower = {entry.lower(): entry for entry in known}
    near = [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.5)]
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise ValueError(
        f"unknown model {name!r}: it is no directory here, and none of the models whose config is known{hint}."
        f" Known are {', '.join(recipe_names())}. For another model give a directory with its config.json"
    )


def read_config(name: str) -> Any:
    """Return a model's Transformers config, without its weights; see `raw_config`.

    Raises:
        ValueError: There is no such model, it is of a refused architecture, or Transformers cannot read its config.
    """
    from transformers import AutoConfig

    raw = raw_config(name)
    refuse_architectures(raw.get("architectures") or [])  # Transformers may not know them
    try:
        return AutoConfig.for_model(**raw)
    except Exception as error:
        raise ValueError(f"Transformers cannot read the config of {name!r}: {type(error).__name__}: {error}") from error
