"""Main parameters of Transformer Engine's Adam (`use_precision_aware_optimizer`), which keeps half of each.

A bf16 parameter is the upper half of an fp32 number, so that optimizer keeps the lower one only, as a signed number of
16 bits: a negative one says that the parameter was rounded up. As it stands it is no main parameter to any other
optimizer (megatron-core 0.19.2 saves it as one), so checkpoints hold the whole. What is no half is left alone.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_megatron_rl.compat.optimizer_state import get_state, set_state

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

MAIN = "param"  # Megatron's name for the full-precision copy
_BITS = 16


def join(parameter: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 numbers of which `parameter` is the upper half and `remainder` the lower one.

    Args:
        parameter: bf16, rounded half away from zero.
        remainder: int16, of the same shape.
    """
    upper = parameter.detach().view(torch.int16).int() - (remainder < 0).int()
    return ((upper << _BITS) | (remainder.int() & 0xFFFF)).view(torch.float32)


@torch.no_grad()
def split(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return the lower halves of fp32 numbers; `parameter` becomes the upper ones, which it should be already.

    A number halfway between two bf16 that were rounded to the one below (torch rounds to even) becomes the next
    smaller number in fp32, so that the parameter stays what it is on every replica.

    Args:
        whole: fp32.
        parameter: bf16, of the same shape; written to where it is another number.
    """
    bits = whole.contiguous().view(torch.int32)
    upper, remainder = bits >> _BITS, (bits << _BITS) >> _BITS
    halfway = (remainder == -(1 << (_BITS - 1))) & (parameter.view(torch.int16) == upper)
    remainder = torch.where(halfway, (1 << (_BITS - 1)) - 1, remainder).to(torch.int16)
    parameter.view(torch.int16).copy_((upper + (remainder < 0).int()).to(torch.int16))
    return remainder


def make_states(optimizer: Any) -> None:
    """Give every parameter the state that its first step would make; Megatron calls this without an argument it needs.

    Args:
        optimizer: Transformer Engine's `FusedAdam`.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if not optimizer.state[parameter]:
            optimizer.initialize_state(parameter, _keeps_half(optimizer, parameter))


def whole_state(part: "DistributedOptimizer", parameter: Tensor) -> dict[str, Tensor]:
    """Return what this rank has of a model parameter's main parameter and moments, the main one whole."""
    state = get_state(part, parameter)
    if not _keeps_main_parameters(part):
        return state
    shard = _shard(part, parameter)
    if shard.dtype == torch.float32:  # is its own main parameter; the optimizer's copy is that of the start
        return {**state, MAIN: shard}
    return {**state, MAIN: join(shard, state[MAIN])} if state[MAIN].dtype == torch.int16 else state


def give_state(part: "DistributedOptimizer", parameter: Tensor, state: dict[str, Tensor]) -> None:
    """Take what `whole_state` returned."""
    if _keeps_main_parameters(part):
        shard = _shard(part, parameter)
        if _keeps_half(part.optimizer, shard):
            state = {**state, MAIN: split(state[MAIN], shard)}
    set_state(part, parameter, state)


def _keeps_main_parameters(part: "MegatronOptimizer") -> bool:
    """Whether this is one of Megatron's optimizers around Transformer Engine's that keep main parameters themselves."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    is_aware = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    return is_aware and not isinstance(part.optimizer, HybridDeviceOptimizer)


def _keeps_half(optimizer: Any, shard: Tensor) -> bool:
    return optimizer.store_param_remainders and shard.dtype == torch.bfloat16


def _shard(part: "DistributedOptimizer", parameter: Tensor) -> Tensor:
    """This rank's part of a model parameter, in the model's own memory."""
    group, number = part.model_param_group_index_map[parameter]
    return part.optimizer.param_groups[group]["params"][number]
