"""How many bytes a trained parameter takes under the user's settings of Megatron's DDP and optimizer."""

from typing import TYPE_CHECKING, Optional

import torch

from lightning_megatron_rl.compat.adam import Adam
from lightning_megatron_rl.planner.memory import StateBytes
from lightning_megatron_rl.strategy.precision import MegatronPrecision

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

_FP32 = 4  # bytes


def state_size(
    precision: MegatronPrecision,
    ddp_config: "DistributedDataParallelConfig",
    config: Optional["OptimizerConfig"],
    *,
    fused: bool,
) -> StateBytes:
    """Return the bytes per parameter on the device (megatron-core 0.19.2, Transformer Engine 2.20).

    `main_grads_dtype` changes nothing: gradients are in the format that they are reduced in.

    Args:
        precision: The Trainer's.
        ddp_config: What `settings.resolve_ddp_config` returned.
        config: The user's optimizer config; None: Adam.
        fused: What `has_fused_adam` says.

    Example:
        bf16-mixed with `use_precision_aware_optimizer`: ``StateBytes(weights=2, gradients=4, optimizer=10)``
    """
    weights = precision.params_dtype.itemsize
    gradients = _FP32 if ddp_config.grad_reduce_in_fp32 else weights
    main = _FP32 if precision.precision in ("bf16-mixed", "16-mixed") else 0
    copies = _FP32 if main > 0 and gradients < _FP32 else 0  # `main_grad.float()`, before the step
    if config is not None and config.optimizer == "sgd":
        momentum = (main or weights) if config.sgd_momentum else 0
        return StateBytes(weights, gradients, main + momentum, copies)
    if config is not None and config.optimizer_cpu_offload:
        # `HybridDeviceOptimizer`: full-precision copies and moments of the rest
        kept = 1 - config.optimizer_offload_fraction
        return StateBytes(weights, gradients, kept * 3 * _FP32, kept * copies)
    if config is not None and config.use_precision_aware_optimizer:
        if config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:  # then Transformer Engine keeps main parameters
            main, copies = _main_parameters(config, precision.params_dtype), 0
        moments = config.exp_avg_dtype.itemsize + config.exp_avg_sq_dtype.itemsize
        return StateBytes(weights, gradients, main + moments, copies + _unscaled(config))
    moment = _FP32 if main or fused else weights
    return StateBytes(weights, gradients, main + 2 * moment, copies)


def _main_parameters(config: "OptimizerConfig", params_dtype: torch.dtype) -> int:
    """Bytes of what `FusedAdam(master_weights=True)` keeps, of fp32 parameters too."""
    whole = config.main_params_dtype
    is_half = config.store_param_remainders and params_dtype == torch.bfloat16 and whole == torch.float32
    return torch.int16.itemsize if is_half else whole.itemsize


def _unscaled(config: "OptimizerConfig") -> int:
    """Bytes of what `FusedAdam` makes fp32 numbers of, for a step: all but fp32, and two moments in bf16."""
    moments = (config.exp_avg_dtype, config.exp_avg_sq_dtype)
    stored = [] if set(moments) == {torch.bfloat16} else list(moments)
    if config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        stored.append(config.main_params_dtype)
    return _FP32 * sum(dtype != torch.float32 for dtype in stored)


def has_fused_adam() -> bool:
    """Whether Megatron takes Transformer Engine's or Apex's Adam: its moments are fp32 whatever the parameters are."""
    from megatron.core import optimizer

    return optimizer.Adam not in (Adam, torch.optim.AdamW)
