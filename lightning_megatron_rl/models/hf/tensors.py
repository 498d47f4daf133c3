"""Hugging Face tensors as Megatron's parameters, one at a time: for models that are larger than memory."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_megatron_rl.compat.bridge import model_bridge
from lightning_megatron_rl.utilities.finite import describe_nonfinite, nonfinite_names, not_finite


class HFWeights:
    """The weights of a Hugging Face checkpoint as Megatron has them, each made when it is asked for.

    Where one Hugging Face tensor holds all experts of a layer, those of the last layer that was asked for are kept.

    Args:
        bridge: Megatron-Bridge's converter for the checkpoint.
        chunks: The whole model, on any device; of its parameters it is the shapes that count.
    """

    def __init__(self, bridge: Any, chunks: list[Any]) -> None:
        self._converter = model_bridge(bridge)  # each access makes a new one, and conversion needs what planning found
        self._state = bridge.hf_pretrained.state
        tasks = self._converter.build_conversion_tasks(bridge.hf_pretrained, chunks)
        self.tasks = [task for task in tasks if task is not None and task.param_weight is not None]
        self._kept: dict[str, Any] = {}  # tensors of several experts by name

    @cached_property
    def names(self) -> set[str]:
        """Hugging Face names of the checkpoint's tensors."""
        return set(self._state.source.get_all_keys())

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the checkpoint."""
        tensor: Tensor = self._state[name]
        return tensor

    @torch.no_grad()
    def read(self, task: Any) -> Tensor:
        """Return a whole parameter of the model, in its own precision, on the CPU.

        Raises:
            ValueError: The checkpoint's tensors have another shape than the model's, or are not finite in its
                precision.
        """
        source = task.mapping.hf_param
        if isinstance(source, str) and getattr(task.mapping, "is_grouped_export", False):
            found = self._keep(source)
        else:
            found = self._converter.maybe_modify_loaded_hf_weight(source, self._state)
        weight: Tensor = task.mapping.hf_to_megatron(found, task.megatron_module)
        if weight.shape != task.param_weight.shape:
            raise ValueError(
                f"the checkpoint's {source} make {task.global_param_name} {tuple(weight.shape)}, but the model of its"
                f" config.json has {tuple(task.param_weight.shape)}: weights and config do not belong together"
            )
        weight = weight.to(task.param_weight.dtype)
        if nonfinite_names([("", weight)]):
            raise ValueError(not_finite([describe_bad(task, self._state)]))
        return weight

    def _keep(self, name: str) -> Any:
        layer = name.rpartition(".")[0]
        self._kept = {kept: tensor for kept, tensor in self._kept.items() if kept.startswith(f"{layer}.")}
        if name not in self._kept:
            self._kept[name] = self._converter.maybe_modify_loaded_hf_weight(name, self._state)
        return self._kept[name]


def describe_bad(task: Any, state: Any) -> str:
    """Say which of a checkpoint's tensors make a parameter that is not finite, and why it is not.

    Args:
        task: Megatron-Bridge's conversion of the parameter.
        state: Of the checkpoint's tensors, by name.
    """
    source, dtype = task.mapping.hf_param, task.param_weight.dtype
    there = set(state.source.get_all_keys())
    names = [source] if isinstance(source, str) else list(source.values())
    tensors = {name: state[name] for name in names if name in there}
    bad = nonfinite_names(tensors.items())
    if bad:
        return ", ".join(f"{name} has {describe_nonfinite(tensors[name])}" for name in bad)
    limit = torch.finfo(dtype).max
    largest = {name: float(tensor.abs().max()) for name, tensor in tensors.items()}
    over = [f"{name} reaches {value:g}" for name, value in largest.items() if value > limit]
    return f"{', '.join(over or names)}, and {dtype} ends at {limit:g}" if over else ", ".join(names)
