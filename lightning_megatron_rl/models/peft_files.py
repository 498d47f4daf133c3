"""Adapters in PEFT's format: names, the two files, and reading them back into a Transformers model."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron_rl.models.lora import LoRASettings

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SUFFIXES = (".lora_A.weight", ".lora_B.weight")


def adapter_config(weights: Mapping[str, Tensor], settings: LoRASettings, base: str, num_layers: int) -> dict[str, Any]:
    """Return PEFT's description of `weights`, named ``<module>.lora_A.weight`` and ``<module>.lora_B.weight``.

    Modules are named by their last part ("q_proj") if every one of `num_layers` layers has it, in full otherwise.
    """
    modules = [name.removesuffix(_SUFFIXES[0]) for name in weights if name.endswith(_SUFFIXES[0])]
    counts = Counter(module.rpartition(".")[2] for module in modules)
    targets = {
        module.rpartition(".")[2] if counts[module.rpartition(".")[2]] == num_layers else module for module in modules
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def write_adapter(directory: Path, weights: Mapping[str, Tensor], config: dict[str, Any]) -> None:
    """Write both files; the directory appears under its name when it is complete.

    Raises:
        ValueError: The directory exists and is not empty.
    """
    from safetensors.torch import save_file

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not empty: remove it or choose another directory")
    temporary = directory.parent / f".{directory.name}.{os.getpid()}.partial"
    temporary.mkdir(parents=True)
    try:
        named = {f"{_PREFIX}{name}": tensor for name, tensor in weights.items()}
        save_file(named, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        (temporary / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        if directory.exists():
            directory.rmdir()
        temporary.rename(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@torch.no_grad()
def merge_adapter(model: torch.nn.Module, directory: Path) -> None:
    """Add an adapter's ``lora_alpha / r * B A`` to the weights of a Transformers model, in place.

    Raises:
        AttributeError: The adapter has a module that the model lacks.
    """
    from safetensors.torch import load_file

    config = json.loads((directory / CONFIG_FILE).read_text())
    weights = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(directory / WEIGHTS_FILE).items()}
    for name, a in weights.items():
        if name.endswith(_SUFFIXES[0]):
            module = name.removesuffix(_SUFFIXES[0])
            b = weights[module + _SUFFIXES[1]]
            weight = model.get_submodule(module).get_parameter("weight")
            weight.add_(b.to(weight.dtype) @ a.to(weight.dtype), alpha=config["lora_alpha"] / config["r"])
