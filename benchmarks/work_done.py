"""In which numbers a run trained, and by which optimizer, read from the run itself: what two sides must share.

Not what either side was asked for: an option that does not arrive would make the comparison unfair and go unnoticed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# attention's output projection, dense models and mixtures alike: a product with weights, so that autocast has its say
# (residual streams may be fp32 under it)
MEGATRON_PROJECTION = ".self_attention.linear_proj"
TRANSFORMERS_PROJECTION = ".self_attn.o_proj"
MOMENTS = ("exp_avg", "exp_avg_sq")
_MOMENT_NAMES = {"float32": "fp32", "bfloat16": "bf16"}
_ADAMS = ("Adam", "AdamW", "FusedAdam")  # torch's, Megatron's and Transformer Engine's; decay is told apart from them


class ComputeDtype:
    """Notes the dtype that a layer's product has in forward passes of training.

    Args:
        model: Is searched for the first module of that name, to which a forward hook is added.
        ending: How the module's name ends.

    Raises:
        ValueError: There is no such module.
    """

    def __init__(self, model: nn.Module, ending: str) -> None:
        layer = next((module for name, module in model.named_modules() if name.endswith(ending)), None)
        if layer is None:
            raise ValueError(f"no module of {type(model).__name__} has a name that ends with {ending!r}")
        self._layer = ending
        self._found: set[str] = set()
        layer.register_forward_hook(self._note)

    def _note(self, module: nn.Module, arguments: Any, output: Any) -> None:
        product = output[0] if isinstance(output, tuple) else output  # Megatron's linear layers return their bias, too
        if product.requires_grad:  # else it is sampling, or log-probs
            self._found.add(_dtype_name(product))

    def name(self) -> str:
        """Return it, such as "bfloat16".

        Raises:
            RuntimeError: There was no forward pass with gradients.
        """
        return _joined(self._found, f"no output of {self._layer} had gradients: nothing was trained")


def optimizer_work(optimizers: Sequence[Any]) -> dict[str, str]:
    """Return `main_parameters`, `moments` and `optimizer` as the state of optimizers that have taken steps has them.

    Args:
        optimizers: torch's, or Transformer Engine's: those inside what Megatron or Accelerate wraps around them.

    Raises:
        RuntimeError: No parameter has a state.
        ValueError: A state has no moments, or half a main parameter without the other half.

    Example:
        ``{"main_parameters": "float32", "moments": "bf16", "optimizer": "adam"}``
    """
    main: set[str] = set()
    moments: set[str] = set()
    for optimizer in optimizers:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            state = optimizer.state.get(parameter)
            if not state:  # never had a gradient
                continue
            if missing := [name for name in MOMENTS if name not in state]:
                raise ValueError(f"the state of {type(optimizer).__name__} has no {missing}: it has {sorted(state)}")
            main.add(_main_name(parameter, state.get("master_param")))
            names = (_dtype_name(state[name]) for name in MOMENTS)
            moments.update(_MOMENT_NAMES.get(name, name) for name in names)
    absent = "no parameter has a state: the optimizer has taken no step"
    return {
        "main_parameters": _joined(main, absent),
        "moments": _joined(moments, absent),
        "optimizer": _joined({_optimizer_name(optimizer) for optimizer in optimizers}, "there is no optimizer"),
    }


def megatron_work(optimizer: Any) -> dict[str, str]:
    """Return `optimizer_work` of this project's `MegatronOptimizer`."""
    return optimizer_work([part.optimizer for part in optimizer.parts() if not part.is_stub_optimizer])


def _main_name(parameter: Tensor, master: Tensor | None) -> str:
    """What steps are added to: the parameter itself, or what Transformer Engine's Adam keeps in its state.

    Megatron's other optimizers step fp32 copies of bf16 parameters: these are the inner optimizer's parameters then.
    """
    if master is None or parameter.dtype == torch.float32:  # then its copy is not used
        return _dtype_name(parameter)
    if master.dtype == torch.int16:  # the lower half of an fp32 number whose upper one is the parameter
        if parameter.dtype != torch.bfloat16:
            raise ValueError(f"16 bits beside a parameter in {parameter.dtype} are no half of an fp32 number")
        return "float32"
    return _dtype_name(master)


def _optimizer_name(optimizer: Any) -> str:
    """The kind, and its weight decay if there is any (without, Adam and AdamW are the same)."""
    kind = type(optimizer).__name__
    decays = {float(group["weight_decay"]) for group in optimizer.param_groups} - {0.0}
    return "adam" if kind in _ADAMS and not decays else " ".join([kind, *(f"decay={value:g}" for value in decays)])


def _dtype_name(tensor: Tensor) -> str:
    """Its name without torch's prefix; a class of quantized numbers, which may pose as another dtype, by its own."""
    plain = type(tensor) in (Tensor, nn.Parameter)
    return str(tensor.dtype).removeprefix("torch.") if plain else type(tensor).__name__


def _joined(names: set[str], absent: str) -> str:
    """All of them, which is one where the run is right."""
    if not names:
        raise RuntimeError(absent)
    return " and ".join(sorted(names))
