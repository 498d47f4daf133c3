"""State of a module outside its `model`: parameters, buffers and submodules that Megatron does not train."""

import warnings
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_megatron_rl.compat.torch_names import own_state


def state_outside_model(module: "pl.LightningModule") -> dict[str, Any]:
    """The module's own parameters and persistent buffers, and the state of its submodules other than `model`."""
    state = own_state(module)
    untrained = [name for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad]
    for name, child in module.named_children():
        if name != "model":
            state.update(child.state_dict(prefix=f"{name}."))
            untrained += [f"{name}.{key}" for key, value in child.named_parameters() if value.requires_grad]
    if untrained:
        warnings.warn(
            f"{type(module).__name__} holds parameters outside `model` ({', '.join(untrained[:3])}): they are saved,"
            " but MegatronStrategy does not train them.",
            stacklevel=2,
        )
    return state


def load_outside_model(module: "pl.LightningModule", saved: Mapping[str, Any], strict: bool) -> None:
    """Load it.

    Raises:
        ValueError: Names what the checkpoint lacks, has too many, or has in another shape; with `strict` off
            (`LightningModule.strict_loading`) only the last.
    """
    own = state_outside_model(module)
    missing = sorted(own.keys() - saved.keys()) if strict else []
    extra = sorted(saved.keys() - own.keys()) if strict else []
    shapes = [
        f"{name} {_shape(saved[name])} != {_shape(own[name])}"
        for name in sorted(own.keys() & saved.keys())
        if _shape(saved[name]) != _shape(own[name])
    ]
    if missing or extra or shapes:
        found = {"not in the checkpoint": missing, "not in the module": extra, "of another shape": shapes}
        named = "; ".join(f"{what}: {', '.join(names)}" for what, names in found.items() if names)
        raise ValueError(
            f"what {type(module).__name__} holds outside `model` is not what the checkpoint holds: {named} (checkpoint"
            " != module). Register the same parameters, buffers and submodules, change them in on_load_checkpoint, or"
            " set strict_loading=False on the module to load what fits by name."
        )
    module.load_state_dict({name: value for name, value in saved.items() if name in own}, strict=False)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
