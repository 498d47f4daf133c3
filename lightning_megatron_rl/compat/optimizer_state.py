"""The state of one parameter in Megatron's distributed optimizer; docs/private_apis.md says why it is needed."""

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def get_state(part: "DistributedOptimizer", parameter: Tensor) -> dict[str, Tensor]:
    """Return what this rank has of a model parameter's main parameter and moments."""
    return part._get_main_param_and_optimizer_states(parameter)


def set_state(part: "DistributedOptimizer", parameter: Tensor, state: dict[str, Tensor]) -> None:
    """Take what `get_state` returned."""
    part._set_main_param_and_optimizer_states(parameter, state)
