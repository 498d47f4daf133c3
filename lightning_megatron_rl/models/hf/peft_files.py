"""Adapters in PEFT's format: names, the two files, and reading them back into a Transformers model.

Transformers keeps the experts of a layer as two parameters, ``experts.gate_up_proj`` and ``experts.down_proj``, each
[experts, out, in] (GPT-OSS: [experts, in, out]), and PEFT the adapter of a parameter as A [experts x rank, in], expert
by expert, and B [out, rank x experts], in which the experts vary fastest. The adapter of a parameter wraps the module
of the parameter; that of the second wraps the first's, which files call the ``base_layer``.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron_rl.models.families.registry import FAMILIES
from lightning_megatron_rl.models.hf.writer import PartialDirectory
from lightning_megatron_rl.models.layers.lora import LoRASettings

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SUFFIXES = (".lora_A.weight", ".lora_B.weight")
_EXPERTS = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}  # layers of Megatron -> parameters of Transformers


def stack_experts(
    adapters: Iterable[tuple[str, Tensor, Tensor]], num_experts: int, *, interleaved: bool = False
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of the adapters of experts by parameter, ``model.layers.0.mlp.experts.down_proj``.

    Args:
        adapters: Megatron's name, A [rank, in] and B [out, rank] of each adapted layer. Experts without get zeros.
        num_experts: Of a layer of the model.
        interleaved: Rows of gate_up_proj alternate between gate and up.

    Example:
        B of ``decoder.layers.2.mlp.experts.local_experts.1.linear_fc2`` becomes columns 1, 1 + num_experts, ... of B of
        ``model.layers.2.mlp.experts.down_proj``.
    """
    stacks: dict[str, list[tuple[Tensor, Tensor] | None]] = {}
    for name, a, b in adapters:
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc.)", name)
        assert match is not None, name
        parameter = _EXPERTS[match[3]]
        if interleaved and parameter == "gate_up_proj":
            b = b.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
        stack = stacks.setdefault(f"model.layers.{match[1]}.mlp.experts.{parameter}", [None] * num_experts)
        stack[int(match[2])] = (a.cpu(), b.cpu())
    stacked = {}
    for name, stack in stacks.items():
        some = next(pair for pair in stack if pair is not None)
        pairs = [pair or (torch.zeros_like(some[0]), torch.zeros_like(some[1])) for pair in stack]
        stacked[name] = (torch.cat([a for a, _ in pairs]), torch.stack([b for _, b in pairs], -1).flatten(1))
    return stacked


def name_experts(stacked: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return what `stack_experts` returned under the names that a file has for it."""
    modules = _modules(stacked)
    return {
        modules[name] + suffix: t for name, pair in stacked.items() for suffix, t in zip(_SUFFIXES, pair, strict=True)
    }


def _modules(parameters: Collection[str]) -> dict[str, str]:
    """Parameter of experts -> module that its adapter has in a file."""
    modules = {}
    for name in parameters:
        module, _, parameter = name.rpartition(".")
        inner = parameter == "gate_up_proj" and f"{module}.down_proj" in parameters
        modules[name] = f"{module}.base_layer" if inner else module
    return modules


def adapter_config(
    weights: Mapping[str, Tensor],
    settings: LoRASettings,
    base: str,
    num_layers: int,
    *,
    experts: Iterable[str] = (),
    mixture: bool = False,
) -> dict[str, Any]:
    """Return PEFT's description of `weights`, named ``<module>.lora_A.weight`` and ``<module>.lora_B.weight``.

    Modules are named by their last part ("q_proj") if every one of `num_layers` layers has it, in full otherwise.

    Args:
        weights: Of the adapters, those of experts left out.
        settings: Rank and scaling.
        base: Name or directory of the model.
        num_layers: Of the model.
        experts: Parameters of experts with adapters, ``model.layers.0.mlp.experts.down_proj``.
        mixture: The model is a mixture of experts. PEFT (0.21) takes every module called gate_proj, up_proj or
            down_proj for experts then; those that are none are named by their parameter.
    """
    modules = [name.removesuffix(_SUFFIXES[0]) for name in weights if name.endswith(_SUFFIXES[0])]
    counts = Counter(module.rpartition(".")[2] for module in modules)
    parameters = [*experts, *(f"{module}.weight" for module in modules if mixture and ".mlp." in module)]
    targets = {
        module.rpartition(".")[2] if counts[module.rpartition(".")[2]] == num_layers else module
        for module in modules
        if not (mixture and ".mlp." in module)
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
        "lora_dropout": 0.0 if parameters else settings.dropout,  # PEFT has none on parameters
        "target_modules": sorted(targets),
        "target_parameters": sorted(parameters) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def prefixed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of adapters under their names in a file."""
    return {f"{_PREFIX}{name}": tensor for name, tensor in weights.items()}


def write_adapter(directory: Path, weights: Mapping[str, Tensor], config: dict[str, Any]) -> None:
    """Write both files; the directory appears under its name when it is complete.

    Raises:
        ValueError: The directory exists and is not empty.
    """
    from safetensors.torch import save_file

    with PartialDirectory(directory) as partial:
        save_file(prefixed(weights), partial.path / WEIGHTS_FILE, metadata={"format": "pt"})
        (partial.path / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        partial.publish()


@torch.no_grad()
def merge_adapter(model: Any, directory: Path) -> None:
    """Add an adapter's ``lora_alpha / r * B A`` to the weights of a Transformers model, in place.

    Raises:
        AttributeError: The adapter has a module that the model lacks.
    """
    from safetensors.torch import load_file

    config = json.loads((directory / CONFIG_FILE).read_text())
    scale = config["lora_alpha"] / config["r"]
    weights = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(directory / WEIGHTS_FILE).items()}
    parameters = [name for name in config["target_parameters"] or [] if not name.endswith(".weight")]
    family = FAMILIES[model.config.model_type]
    transposed = family.experts is not None and family.experts.transposed
    experts = {module: name for name, module in _modules(parameters).items()}
    for name, a in weights.items():
        if name.endswith(_SUFFIXES[0]):
            module = name.removesuffix(_SUFFIXES[0])
            b = weights[module + _SUFFIXES[1]]
            if module not in experts:
                weight = model.get_submodule(module).get_parameter("weight")
                weight.add_(b.to(weight.dtype) @ a.to(weight.dtype), alpha=scale)
                continue
            weight = model.get_parameter(experts[module])
            count = weight.size(0)
            b = b.to(weight.dtype).unflatten(1, (-1, count)).permute(2, 0, 1)  # [experts, out, rank]
            update = b @ a.to(weight.dtype).unflatten(0, (count, -1))
            weight.add_(update.mT if transposed else update, alpha=scale)
