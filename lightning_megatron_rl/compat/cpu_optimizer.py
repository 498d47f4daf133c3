"""Megatron's optimizer with state and step on the host (`optimizer_cpu_offload`): its traps, and their fixes.

Megatron steps full-precision copies of the parameters, those on the host with torch's AdamW and the rest with
Transformer Engine's, and has three traps (megatron-core 0.19.2). It has no moments before its first step, and makes
those that a checkpoint is loaded into by a step with random gradients, which moves the model's weights. A parameter
group that was loaded has the number of steps, which it then gives to the device's optimizer before every step: the
count stands still. And loading looks for a full-precision copy of each parameter, which one in fp32 has not.
"""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

_STEP = "step"
_FIELDS = ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d")
_MACHINERY = (  # of parameter groups: how a step is done, not what it does
    *("offload_fraction", "cpu_optimizer_cls", "gpu_optimizer_cls", "param_update_in_fp32", "fused"),
    *("pin_cpu_grads", "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d"),
)
_DTYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def check_cpu_optimizer(config: "OptimizerConfig", defaults: dict[str, Any], *, precision: str, sharded: bool) -> None:
    """Refuse settings under which Megatron's offloaded optimizer is wrong, or does nothing.

    Args:
        config: The user's.
        defaults: Megatron's.
        precision: A `MegatronPrecision` by name.
        sharded: Whether the optimizer's state is sharded over replicas.

    Raises:
        ValueError: Such a setting; names what to set.
    """
    if not config.optimizer_cpu_offload:
        for name in (name for name in _FIELDS if getattr(config, name) != defaults[name]):
            raise ValueError(
                f"OptimizerConfig.{name}={getattr(config, name)} does nothing without optimizer_cpu_offload=True: set"
                f" that, or remove {name}."
            )
        return
    given = "OptimizerConfig.optimizer_cpu_offload=True"
    if precision == "32-true":
        raise ValueError(
            f"{given} with Trainer(precision='32-true'): Megatron cannot load a checkpoint of it, since it looks for a"
            " full-precision copy beside each parameter. Use precision='bf16-mixed', or remove it."
        )
    if not sharded:
        raise ValueError(
            f"{given} with use_distributed_optimizer=False: only the distributed optimizer takes gradients to the host."
            " Set MegatronStrategy(use_distributed_optimizer=True)."
        )
    if not config.use_precision_aware_optimizer:
        raise ValueError(
            f"{given} without use_precision_aware_optimizer=True: Megatron would keep a second full-precision copy of"
            " the parameters on the device, 4 bytes each, and step from stale ones after a checkpoint is loaded. Set"
            " both."
        )
    if not 0 < config.optimizer_offload_fraction <= 1:
        raise ValueError(
            f"{given} with optimizer_offload_fraction={config.optimizer_offload_fraction}: it is the share of the"
            " optimizer that goes to the host, above 0 and up to 1; 1.0 moves all of it."
        )
    if not config.decoupled_weight_decay:
        raise ValueError(f"{given} with decoupled_weight_decay=False: the host has AdamW. Remove the latter.")
    for name in (name for name in _DTYPES if getattr(config, name) != defaults[name]):
        raise ValueError(
            f"OptimizerConfig.{name}={getattr(config, name)} with optimizer_cpu_offload=True does nothing: the host's"
            f" optimizer keeps its state in fp32. Remove {name}."
        )


def is_on_host(part: "MegatronOptimizer") -> bool:
    """Whether one of Megatron's optimizers keeps some of its state on the host."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    return isinstance(part.optimizer, HybridDeviceOptimizer)


@torch.no_grad()
def make_moments(hybrid: "HybridDeviceOptimizer") -> None:
    """Give every parameter the state that its first step would make, and move no weight; nothing if there is one."""
    if hybrid.state:
        return
    for optimizer in hybrid.sub_optimizers:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if not isinstance(optimizer, torch.optim.AdamW):  # Transformer Engine's, which counts steps per group
                optimizer.initialize_state(parameter, store_param_remainders=False)
                continue
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {_STEP: torch.zeros((), dtype=torch.float32), **moments}
    hybrid._sync_sub_optimizers_state_to_hdo()


def saved_groups(hybrid: "HybridDeviceOptimizer") -> list[dict[str, Any]]:
    """Return the parameter groups as any other Adam has them, with the number of steps."""
    groups = [{name: value for name, value in group.items() if name not in _MACHINERY} for group in hybrid.param_groups]
    return [{**group, _STEP: _num_steps(hybrid)} for group in groups]


def _num_steps(hybrid: "HybridDeviceOptimizer") -> int:
    for optimizer in hybrid.sub_optimizers:
        for state in optimizer.state.values():
            if _STEP in state:
                return int(state[_STEP])
    return 0


def take_loaded_state(hybrid: "HybridDeviceOptimizer") -> None:
    """Let the host's and the device's optimizers go on from a state that was put into `hybrid.state`."""
    hybrid._sync_hdo_state_to_sub_optimizers()
    for group in hybrid.param_groups:
        group.pop(_STEP, None)  # the optimizers have it by now, and count on
