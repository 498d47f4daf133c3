"""Completes and checks the user's DDP and optimizer configs of Megatron."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Optional

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_megatron_rl.compat.cpu_optimizer import check_cpu_optimizer
from lightning_megatron_rl.compat.field_rules import Rule, check_settings, dataclass_defaults
from lightning_megatron_rl.utilities.kinds import check_kinds
from lightning_megatron_rl.utilities.ranges import COUNT, NOT_NEGATIVE, POSITIVE, PROBABILITY, SHARE, check_ranges

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

_FSDP = "chunks are wrapped in Megatron's DDP, with optimizer state sharded by use_distributed_optimizer; remove it"
_FP8 = "it belongs to fp8 parameters, see train.model_config={'fp8': ...}"
_SCHEDULER = "the learning rate is that of the module's lr_scheduler; remove it"
_OFFLOAD = "optimizer state already is in host memory; remove it"

DDP_RULES: dict[str, Rule] = {
    "average_in_collective": Rule("never", "gradients are summed and divided once by the number of tokens; remove it"),
    "num_distributed_optimizer_instances": Rule("never", "optimizer state is sharded over all replicas; remove it"),
    "align_param_gather": Rule("never", "each pipeline stage gathers when it needs the parameters", speed_only=True),
    "pad_buckets_for_high_nccl_busbw": Rule("cuda", "it is about NCCL", speed_only=True),
    "nccl_ub": Rule("cuda", "it registers buffers with NCCL; remove it"),
    "disable_symmetric_registration": Rule("cuda", "it registers buffers with NCCL; remove it"),
    "reduce_scatter_with_fp32_accumulation": Rule("cuda", "set grad_reduce_in_fp32=True"),
    "fp8_param_gather": Rule("cuda", _FP8),
    "fp4_param_gather": Rule("cuda", _FP8),
    "reuse_grad_buf_for_mxfp8_param_ag": Rule("cuda", _FP8),
    "use_megatron_fsdp": Rule("never", _FSDP),
    "use_custom_fsdp": Rule("never", _FSDP),
    "data_parallel_sharding_strategy": Rule("never", _FSDP),
    "outer_dp_sharding_strategy": Rule("never", _FSDP),
    "suggested_communication_unit_size": Rule("never", _FSDP),
    "keep_fp8_transpose_cache": Rule("never", _FSDP),
    "fsdp_*": Rule("never", _FSDP),
    "megatron_fsdp_*": Rule("never", _FSDP),
    "delay_wgrad_compute": Rule("never", "it needs another schedule of Megatron's; remove it"),
}

OPTIMIZER_RULES: dict[str, Rule] = {
    "min_lr": Rule("never", _SCHEDULER),
    "decoupled_min_lr": Rule("never", _SCHEDULER),
    "use_precision_aware_optimizer": Rule("cuda", "it is Transformer Engine's Adam; use precision='bf16-true'"),
    "use_layer_wise_distributed_optimizer": Rule("never", "it belongs to Muon; use optimizer='adam'"),
    "overlap_param_gather_with_optimizer_step": Rule("never", "set overlap_param_gather in the ddp_config"),
    "optimizer_cpu_offload": Rule("cuda", _OFFLOAD),
    "optimizer_offload_fraction": Rule("cuda", _OFFLOAD),
    "overlap_cpu_optimizer_d2h_h2d": Rule("cuda", _OFFLOAD),
    "use_torch_optimizer_for_cpu_offload": Rule("never", "Megatron takes Transformer Engine's Adam all the same"),
    "optimizer_cuda_graph": Rule("never", "gradient norms are read between the graph's parts; remove it"),
    "log_num_zeros_in_grad": Rule("never", "it is not logged", speed_only=True),
    "muon_*": Rule("never", "use optimizer='adam' or 'sgd'"),
    "lion_*": Rule("never", "use optimizer='adam' or 'sgd'"),
    "soap_*": Rule("never", "use optimizer='adam' or 'sgd'"),
    "adaptive_muon_*": Rule("never", "use optimizer='adam' or 'sgd'"),
}
_LOSS_SCALE = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
# Megatron scales the mean loss of a micro-batch, here it is the sum over its tokens: Megatron's 2^32 would cost two
# dozen skipped steps, each a rollout. A token's logits have gradients up to 1, fp16 ends at 2^16: 2^8 leaves as much
# for sums over tokens. A scale below 1 must be possible where the sums are larger still.
_INITIAL_LOSS_SCALE, _MIN_LOSS_SCALE = 2.0**8, 2.0**-16
_OPTIMIZER_RANGES = {
    "lr": POSITIVE.called("1e-6 is usual for policies"),
    "decoupled_lr": POSITIVE,
    "weight_decay": NOT_NEGATIVE,
    "adam_beta1": PROBABILITY,
    "adam_beta2": PROBABILITY,
    "adam_eps": POSITIVE,
    "sgd_momentum": PROBABILITY,
    "clip_grad": NOT_NEGATIVE,
    "optimizer_offload_fraction": SHARE,
    "loss_scale": POSITIVE,
    "initial_loss_scale": POSITIVE,
    "min_loss_scale": POSITIVE,
    "loss_scale_window": COUNT.called("it is a number of steps"),
    "hysteresis": COUNT.called("it is a number of steps"),
}


def check_optimizer_numbers(config: Optional["OptimizerConfig"], prefix: str = "optimizer.") -> None:
    """Refuse invalid numbers of an optimizer, such as a negative learning rate.

    Args:
        config: The user's; None passes.
        prefix: What the settings belong to, for the error.

    Raises:
        ValueError: With the name, the value and the range.
    """
    if config is None:
        return
    from megatron.core.optimizer import OptimizerConfig

    owner, _, name = prefix.rstrip(".").rpartition(".")
    check_kinds({name: OptimizerConfig}, {name: config}, owner)
    check_ranges(_OPTIMIZER_RANGES, vars(config), prefix)
    if not config.grad_norm_skip_threshold > 0:  # infinite: no step is skipped for its norm
        raise ValueError(
            f"{prefix}grad_norm_skip_threshold={config.grad_norm_skip_threshold!r} must be above 0: every step would"
            " be skipped."
        )


def resolve_ddp_config(
    config: Optional["DistributedDataParallelConfig"],
    *,
    precision: str,
    use_distributed_optimizer: bool,
    device: torch.device,
) -> "DistributedDataParallelConfig":
    """Return Megatron's DDP config, completed: gradients are reduced in fp32 unless the precision is "bf16-true".

    Args:
        config: The user's, or None.
        precision: A `MegatronPrecision` by name.
        use_distributed_optimizer: Overrides the config's field: it must agree with the optimizer's.
        device: What the run is on.

    Raises:
        ValueError: A setting that does nothing here, or contradicts the precision or another setting.
    """
    from megatron.core.distributed import DistributedDataParallelConfig

    check_kinds({"ddp_config": DistributedDataParallelConfig}, {"ddp_config": config}, "MegatronStrategy")
    if config is None:
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=precision != "bf16-true")
    dropped = _check("ddp_config", config, DDP_RULES, device)
    config = replace(config, use_distributed_optimizer=use_distributed_optimizer, **dropped)
    if precision == "bf16-true" and use_distributed_optimizer:
        raise ValueError(
            "precision='bf16-true' with use_distributed_optimizer=True: Megatron's distributed optimizer always keeps"
            " fp32 main parameters and moments, 12 bytes per parameter over the replicas. Set"
            " MegatronStrategy(use_distributed_optimizer=False), which is 2 (parameters) + 2 (gradients) + 4 (moments)"
            " = 8 bytes on every replica (12 with Transformer Engine's Adam, whose moments are fp32), or"
            " precision='bf16-mixed', which is 6 + 12 / replicas."
        )
    if precision == "bf16-true" and config.grad_reduce_in_fp32:
        raise ValueError(
            "ddp_config: grad_reduce_in_fp32=True with precision='bf16-true', whose gradients are bf16: set it to False"
            " or use precision='bf16-mixed'."
        )
    if config.overlap_param_gather and not (use_distributed_optimizer and config.overlap_grad_reduce):
        raise ValueError(
            f"ddp_config: overlap_param_gather=True with use_distributed_optimizer={use_distributed_optimizer} and"
            f" overlap_grad_reduce={config.overlap_grad_reduce}: only the distributed optimizer gathers parameters, and"
            " Megatron overlaps both or the gradients alone. Set both to True, or overlap_param_gather=False."
        )
    if config.check_for_nan_in_grad and precision == "16-mixed":
        raise ValueError(
            "ddp_config: check_for_nan_in_grad=True with precision='16-mixed': it would end the run at the first"
            " overflow, which the loss scale is there to skip. Set it to False."
        )
    check_ranges({"bucket_size": COUNT, "num_buckets": COUNT}, vars(config), "ddp_config.")
    for name in ("bucket_size", "num_buckets"):
        if getattr(config, name) is not None and not config.overlap_grad_reduce:
            rank_zero_warn(
                f"ddp_config: {name}={getattr(config, name)} does nothing without overlap_grad_reduce=True: all"
                " gradients are reduced at once."
            )
    return config


def resolve_optimizer_config(
    config: "OptimizerConfig",
    *,
    precision: str,
    params_dtype: torch.dtype,
    ddp_config: "DistributedDataParallelConfig",
    gradient_clip_val: float | None,
    device: torch.device,
) -> "OptimizerConfig":
    """Return `config` with what the strategy and the Trainer decide filled in.

    Args:
        config: The user's.
        precision: A `MegatronPrecision` by name.
        params_dtype: Dtype of the model's parameters.
        ddp_config: What `resolve_ddp_config` returned.
        gradient_clip_val: The Trainer's.
        device: What the run is on.

    Raises:
        ValueError: `clip_grad` set in the optimizer config and (differently) in the Trainer; no learning rate; an
            optimizer that Megatron does not shard, or that would not train; a setting that does nothing here.
    """
    check_optimizer_numbers(config, "OptimizerConfig.")
    sharded = ddp_config.use_distributed_optimizer
    clip = float(gradient_clip_val or 0.0)
    defaults = dataclass_defaults(type(config))
    if config.clip_grad not in (defaults["clip_grad"], clip):
        raise ValueError(
            f"OptimizerConfig.clip_grad={config.clip_grad} with Trainer(gradient_clip_val={gradient_clip_val}):"
            " gradient clipping is set in one place. Remove clip_grad and set Trainer(gradient_clip_val=...)."
        )
    if config.lr is None:
        raise ValueError("OptimizerConfig.lr is None: set the learning rate, e.g. OptimizerConfig(lr=1e-6).")
    if config.optimizer not in ("adam", "sgd"):
        raise ValueError(f"OptimizerConfig.optimizer={config.optimizer!r} is not supported: use 'adam' or 'sgd'.")
    if config.optimizer == "sgd" and sharded:
        raise ValueError(
            "OptimizerConfig.optimizer='sgd' with use_distributed_optimizer=True: Megatron shards Adam's state, not"
            " SGD's. Set MegatronStrategy(use_distributed_optimizer=False) or optimizer='adam'."
        )
    if config.optimizer == "sgd" and precision == "bf16-true" and _has_fused_sgd():
        raise ValueError(
            "OptimizerConfig.optimizer='sgd' with precision='bf16-true': the SGD of Transformer Engine and Apex takes"
            " fp32 and fp16 parameters, and leaves bf16 ones as they are. Set precision='bf16-mixed' or"
            " optimizer='adam'."
        )
    _check_dtypes(config, precision, params_dtype, defaults)
    if config.overlap_param_gather and not ddp_config.overlap_param_gather:
        raise ValueError(
            "OptimizerConfig.overlap_param_gather=True does nothing by itself: set it in MegatronStrategy(ddp_config="
            "DistributedDataParallelConfig(overlap_grad_reduce=True, overlap_param_gather=True))."
        )
    dropped = _check("OptimizerConfig", config, OPTIMIZER_RULES, device)
    check_cpu_optimizer(config, defaults, precision=precision, sharded=sharded)
    if config.use_precision_aware_optimizer and not sharded:
        raise ValueError(
            "OptimizerConfig.use_precision_aware_optimizer=True with use_distributed_optimizer=False: Megatron has it"
            " for sharded state only. Set MegatronStrategy(use_distributed_optimizer=True), or remove it."
        )
    if precision == "bf16-true":
        _warn_of_lost_updates(config.lr)
    return replace(
        config,
        # bf16 is Megatron's word for fp32 main parameters
        bf16=precision == "bf16-mixed",
        fp16=precision == "16-mixed",
        params_dtype=params_dtype,
        use_distributed_optimizer=sharded,
        overlap_param_gather=ddp_config.overlap_param_gather,
        clip_grad=clip if clip > 0 else math.inf,
        **_loss_scale(config, precision, defaults),
        **dropped,
    )


def _check(owner: str, config: Any, rules: Mapping[str, Rule], device: torch.device) -> dict[str, Any]:
    """Check the fields of `config`; returns the defaults of those to be dropped."""
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    defaults = dataclass_defaults(type(config))
    kept = check_settings(owner, given, defaults, rules, device=device, transformer_engine=False)
    return {name: defaults[name] for name in given if name not in kept}


def _check_dtypes(config: "OptimizerConfig", precision: str, params_dtype: torch.dtype, defaults: Any) -> None:
    """Refuse settings that contradict the Trainer's precision, and a loss scale where none is used."""
    asked = {
        "bf16": config.bf16 and params_dtype != torch.bfloat16,
        "fp16": config.fp16 and params_dtype != torch.float16,
        "params_dtype": config.params_dtype not in (defaults["params_dtype"], params_dtype),
    }
    for name in (name for name, contradicts in asked.items() if contradicts):
        raise ValueError(
            f"OptimizerConfig.{name}={getattr(config, name)} with Trainer(precision={precision!r}): the precision is"
            f" set in one place. Remove {name}, or set the Trainer's precision."
        )
    for name in _LOSS_SCALE:
        if precision != "16-mixed" and getattr(config, name) != defaults[name]:
            raise ValueError(
                f"OptimizerConfig.{name}={getattr(config, name)} with Trainer(precision={precision!r}) does nothing:"
                f" the loss is scaled under precision='16-mixed' only. Remove {name}."
            )


def _loss_scale(config: "OptimizerConfig", precision: str, defaults: Mapping[str, Any]) -> dict[str, float]:
    """Bounds of the dynamic loss scale where the user has left Megatron's.

    Raises:
        ValueError: A scale that is not positive, or starts below its minimum.
    """
    if precision != "16-mixed":
        return {}
    initial, smallest = (
        ours if getattr(config, name) == defaults[name] else getattr(config, name)
        for name, ours in (("initial_loss_scale", _INITIAL_LOSS_SCALE), ("min_loss_scale", _MIN_LOSS_SCALE))
    )
    if initial < smallest:
        raise ValueError(
            f"OptimizerConfig.initial_loss_scale={initial} < min_loss_scale={smallest}: start at or above the minimum."
        )
    return {"initial_loss_scale": initial, "min_loss_scale": smallest}


def _has_fused_sgd() -> bool:
    """Whether Megatron takes another SGD than torch's."""
    from megatron.core import optimizer

    return optimizer.SGD is not torch.optim.SGD


def _warn_of_lost_updates(lr: float) -> None:
    """Warn of weights too large for small updates: neighbours of a bf16 number w are at least w / 256 apart."""
    rank_zero_warn(
        f"precision='bf16-true' rounds every update to bf16: one of less than 1/512 of a weight is lost. Adam's are"
        f" about lr={lr:g}, so weights larger than 512 x {lr:g} = {512 * lr:g} stand still. Use"
        " precision='bf16-mixed' unless the learning rate is large."
    )
