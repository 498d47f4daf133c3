"""Bytes per trained parameter, against what Megatron and Transformer Engine make of the user's settings."""

from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from lightning_megatron_rl.planner.memory import STATE_BYTES, StateBytes
from lightning_megatron_rl.strategy.precision import MegatronPrecision
from lightning_megatron_rl.strategy.state_size import state_size

FP8, FP16, BF16, FP32 = torch.uint8, torch.float16, torch.bfloat16, torch.float32


def size(
    precision: str = "bf16-mixed", *, fp32_gradients: bool = True, fused: bool = True, **options: Any
) -> StateBytes:
    """`state_size`; settings go past the config's own check, which asks for Transformer Engine."""
    config = OptimizerConfig(lr=1e-6)
    decided = options.get("use_precision_aware_optimizer", False) and options.get("fp8_recipe") in (None, "delayed")
    options = {"use_precision_aware_optimizer_no_fp8_or_ds_fp8": decided, "store_param_remainders": True, **options}
    for name, value in options.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=fp32_gradients)
    return state_size(MegatronPrecision(precision), ddp_config, config, fused=fused)


@pytest.mark.parametrize("precision", STATE_BYTES)
def test_defaults_are_those_of_the_precision(precision):
    fp32_gradients = precision != "bf16-true"
    assert size(precision, fp32_gradients=fp32_gradients, fused=False) == STATE_BYTES[precision]
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=fp32_gradients)
    assert state_size(MegatronPrecision(precision), ddp_config, None, fused=False) == STATE_BYTES[precision]


def test_fused_adam_keeps_moments_of_bf16_parameters_in_fp32():
    assert size("bf16-true", fp32_gradients=False) == StateBytes(2, 2, 8)
    assert size("bf16-mixed") == STATE_BYTES["bf16-mixed"]


def test_gradients_in_16_bits_are_made_fp32_for_the_step():
    assert size(fp32_gradients=False) == StateBytes(2, 2, 12, step=4)
    assert size("16-mixed", fp32_gradients=False) == StateBytes(2, 2, 12, step=4)
    assert size("32-true", fp32_gradients=False) == StateBytes(4, 4, 8)  # "not in fp32" is the parameters' own format


AWARE = {"use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    ("precision", "options", "optimizer", "step"),
    [
        # main parameter + moments; fp32 copies of what the kernel does not read as it is
        ("bf16-mixed", {}, 2 + 4 + 4, 0),
        ("bf16-mixed", {"store_param_remainders": False}, 4 + 4 + 4, 0),
        ("16-mixed", {}, 4 + 4 + 4, 0),  # the half of an fp16 number is no upper half of an fp32 one
        ("32-true", {}, 4 + 4 + 4, 0),  # a copy of each parameter, which nobody needs
        ("bf16-mixed", {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}, 2 + 2 + 2, 0),
        ("bf16-mixed", {"exp_avg_dtype": BF16}, 2 + 2 + 4, 4),
        ("bf16-mixed", {"exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP16}, 2 + 1 + 2, 4 + 4),
        ("bf16-mixed", {"main_params_dtype": FP16}, 2 + 4 + 4, 4),
        ("16-mixed", {"main_params_dtype": FP16, "exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP8}, 2 + 1 + 1, 3 * 4),
        # fp8 parameters other than with delayed scaling: Megatron holds the main ones
        ("bf16-mixed", {"fp8_recipe": "mxfp8", "exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP32}, 4 + 1 + 4, 4),
        ("bf16-mixed", {"main_grads_dtype": BF16}, 2 + 4 + 4, 0),  # nobody reads it
    ],
)
def test_precision_aware_optimizer(precision, options, optimizer, step):
    found = size(precision, **AWARE, **options)
    assert (found.gradients, found.optimizer, found.step) == (4, optimizer, step)


def test_precision_aware_optimizer_reads_16_bit_gradients_as_they_are():
    assert size(fp32_gradients=False, **AWARE) == StateBytes(2, 2, 10)


def test_what_is_offloaded_is_not_on_the_device():
    offload = {**AWARE, "optimizer_cpu_offload": True}
    assert size(**offload, optimizer_offload_fraction=1.0) == StateBytes(2, 4, 0)
    # full-precision copies and moments of the other quarter
    assert size(**offload, optimizer_offload_fraction=0.75) == StateBytes(2, 4, 3)
    assert size(fp32_gradients=False, **offload, optimizer_offload_fraction=0.75) == StateBytes(2, 2, 3, step=1)


@pytest.mark.parametrize(
    ("precision", "momentum", "optimizer"),
    [
        ("bf16-mixed", 0.9, 4 + 4),
        ("bf16-mixed", 0.0, 4),
        ("32-true", 0.9, 4),
        ("32-true", 0.0, 0),
    ],
)
def test_sgd_has_one_moment_or_none(precision, momentum, optimizer):
    assert size(precision, optimizer="sgd", sgd_momentum=momentum).optimizer == optimizer
