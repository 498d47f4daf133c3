"""The registry of supported model families, with those of other packages; docs/models.md is made of it."""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lightning_megatron_rl.models.families import (
    deepseek_v3,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    glm4_moe,
    gpt_oss,
    hy_v3,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    nemotron,
    olmoe,
    qwen2,
    qwen3,
    qwen3_moe,
)
from lightning_megatron_rl.models.families.family import Family, Feature

ADDED = "LIGHTNING_MEGATRON_RL_FAMILIES"
"""Environment variable: modules with a family of the user's, separated by commas; every child process sees it."""

_MODULES = (
    *(llama, mistral, qwen2, qwen3, qwen3_moe, mixtral, deepseek_v3, gemma3, gpt_oss),
    *(glm4_moe, olmoe, minimax_m2, nemotron, gemma, gemma2, exaone4, hy_v3),
)
FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
"""By `model_type` in config.json."""


def add_family(module: str) -> Family:
    """Add the family that an importable module has as `FAMILY`, in this process and those that it starts.

    Raises:
        ValueError: Another family has its `model_type`.
    """
    family: Family = import_module(module).FAMILY
    if FAMILIES.setdefault(family.model_type, family) != family:
        raise ValueError(f"{module}: there is a family with model_type={family.model_type!r} already")
    added = _added()
    if module not in added:
        os.environ[ADDED] = ",".join([*added, module])
    return family


def bridges() -> tuple[str, ...]:
    """Return the modules that register the converters of all families, for `compat.bridge.import_auto_bridge`."""
    return tuple(module for family in FAMILIES.values() for module in family.bridges)


def added_files() -> list[str]:
    """Return the files of the families of other packages, and of their converters."""
    added = _added()
    modules = [*added, *(bridge for name in added for bridge in import_module(name).FAMILY.bridges)]
    specs = [find_spec(module) for module in modules if not module.startswith("megatron.")]
    return [spec.origin for spec in specs if spec is not None and spec.origin is not None]


def num_experts(config: Any) -> int:
    """Return how many routed experts a layer of the model of a Hugging Face config has; 0 in a dense model."""
    experts = FAMILIES[config.model_type].experts
    return getattr(config, experts.count) if experts else 0


def table() -> str:
    """The families and their features as a Markdown table, for docs/models.md."""
    columns: tuple[Feature, ...] = ("TP", "TP+SP", "PP", "CP", "EP", "ETP", "packing")
    lines = [
        "| family | `architectures` | attention | MLP | " + " | ".join(columns) + " | refused |",
        "|---" * (len(columns) + 5) + "|",
    ]
    for family in FAMILIES.values():
        marks = ["✓" if feature in family.features else "–" for feature in columns]
        name = family.name if family.transformer_engine else f"{family.name} (torch layers only)"
        cells = [name, f"`{family.architecture}`", family.attention, family.mlp, *marks, family.refused]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _added() -> list[str]:
    return [name for name in os.environ.get(ADDED, "").split(",") if name]


for _module in _added():
    add_family(_module)
