"""Rules for Megatron settings that have an effect on some devices or layers only: refused or warned about elsewhere."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Literal

import torch

Needs = Literal["cuda", "transformer_engine", "never"]


@dataclass(frozen=True)
class Rule:
    """Where a setting has an effect, and what happens to it elsewhere.

    Args:
        needs: "cuda", "transformer_engine" (its layers, on CUDA) or "never": it does nothing under this strategy.
        why: The reason and what to do instead, the end of a sentence.
        speed_only: It changes neither numbers nor memory: a warning is enough, and the setting is dropped.
    """

    needs: Needs
    why: str
    speed_only: bool = False


def check_settings(
    owner: str,
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    rules: Mapping[str, Rule],
    *,
    device: torch.device,
    transformer_engine: bool,
) -> dict[str, Any]:
    """Return `given` without what only makes this run slower; such settings are warned about.

    Args:
        owner: What the settings are fields of, for the message.
        given: Settings as the user has them; one that equals its default, None or False asks for nothing.
        defaults: Megatron's defaults.
        rules: Rules by name; a name that ends in ``*`` stands for all settings that begin like it.
        device: What the run is on.
        transformer_engine: Whether the layers are Transformer Engine's.

    Raises:
        ValueError: A setting that would do nothing here, although it changes numbers or memory.
    """
    has = {"cuda": device.type == "cuda", "transformer_engine": transformer_engine, "never": False}
    kept = {}
    for name, value in given.items():
        rule = _rule_of(name, rules)
        asked = value is not None and value is not False and value != defaults.get(name)
        if rule is None or not asked or has[rule.needs]:
            kept[name] = value
            continue
        message = f"{owner}: {name}={value!r} {_MEANING[rule.needs].format(device=device.type)}: {rule.why}"
        if not rule.speed_only:
            raise ValueError(f"{message}.")
        from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # slow for those who need nothing of it

        rank_zero_warn(f"{message}. It is left out.")
    return kept


_MEANING = {
    "cuda": "does nothing on {device!r}, it needs CUDA",
    "transformer_engine": (
        "does nothing with torch layers on {device!r}, it needs train.layer_backend='transformer_engine'"
    ),
    "never": "does nothing here",
}


def _rule_of(name: str, rules: Mapping[str, Rule]) -> Rule | None:
    if name in rules:
        return rules[name]
    prefixes = [pattern for pattern in rules if pattern.endswith("*") and name.startswith(pattern[:-1])]
    return rules[prefixes[0]] if prefixes else None


def dataclass_defaults(cls: type) -> dict[str, Any]:
    """Return the default of each field of the dataclass `cls` that has one."""
    return {field.name: _default(field) for field in fields(cls)}


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else None
