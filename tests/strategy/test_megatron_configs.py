"""Megatron's DDP and optimizer configs, completed by strategy and Trainer, or refused with the value and a way out."""

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from lightning_megatron_rl.strategy.megatron import MegatronStrategy
from lightning_megatron_rl.strategy.megatron_configs import (
    DDP_RULES,
    OPTIMIZER_RULES,
    resolve_ddp_config,
    resolve_optimizer_config,
)

DTYPES = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
}


def ddp(precision: str = "32-true", sharded: bool = True, **options: Any) -> DistributedDataParallelConfig:
    config = DistributedDataParallelConfig(**options) if options else None
    device = torch.device("cpu")
    return resolve_ddp_config(config, precision=precision, use_distributed_optimizer=sharded, device=device)


def optimizer(precision: str = "32-true", sharded: bool = True, device: str = "cpu", **options: Any) -> OptimizerConfig:
    return resolve_optimizer_config(
        OptimizerConfig(**{"lr": 1e-3, **options}),
        precision=precision,
        params_dtype=DTYPES[precision],
        ddp_config=ddp(precision, sharded),
        gradient_clip_val=None,
        device=torch.device(device),
    )


def test_gradients_are_reduced_in_fp32_but_for_bf16_true():
    for precision in DTYPES:
        config = ddp(precision, sharded=precision != "bf16-true")
        assert config.grad_reduce_in_fp32 is (precision != "bf16-true")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf16-true"}, r"use_distributed_optimizer=True.*fp32 main parameters.* = 8 bytes"),
        ({"precision": "bf16-true", "sharded": False, "grad_reduce_in_fp32": True}, "grad_reduce_in_fp32=True with"),
        ({"precision": "16-mixed", "check_for_nan_in_grad": True}, "check_for_nan_in_grad=True.*loss scale"),
        ({"overlap_param_gather": True}, r"overlap_param_gather=True .*overlap_grad_reduce=False.*Set both"),
        (
            {"sharded": False, "overlap_param_gather": True, "overlap_grad_reduce": True},
            "overlap_param_gather=True with use_distributed_optimizer=False",
        ),
        ({"use_megatron_fsdp": True}, "use_megatron_fsdp=True does nothing here: chunks are wrapped in Megatron's DDP"),
        ({"use_custom_fsdp": True}, "use_custom_fsdp=True"),
        ({"data_parallel_sharding_strategy": "optim"}, "data_parallel_sharding_strategy='optim'"),
        ({"average_in_collective": True}, "average_in_collective=True .*divided once by the number of tokens"),
        ({"num_distributed_optimizer_instances": 2}, "num_distributed_optimizer_instances=2"),
        ({"nccl_ub": True}, "nccl_ub=True does nothing on 'cpu', it needs CUDA"),
        ({"fp8_param_gather": True}, "fp8_param_gather=True does nothing on 'cpu'"),
    ],
)
def test_ddp_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ddp(**options)


def test_ddp_settings_that_are_only_slower():
    with pytest.warns(UserWarning, match="pad_buckets_for_high_nccl_busbw=True does nothing on 'cpu'"):
        assert not ddp(pad_buckets_for_high_nccl_busbw=True).pad_buckets_for_high_nccl_busbw
    with pytest.warns(UserWarning, match="bucket_size=10 does nothing without overlap_grad_reduce=True"):
        ddp(bucket_size=10)


def test_the_users_config_stays_as_it_is():
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, check_for_nan_in_grad=True)
    options = {"precision": "32-true", "use_distributed_optimizer": True, "device": torch.device("cpu")}
    resolved = resolve_ddp_config(config, **options)
    assert (resolved.overlap_grad_reduce, resolved.check_for_nan_in_grad) == (True, True)
    assert not config.use_distributed_optimizer
    assert not resolve_ddp_config(config, **options).grad_reduce_in_fp32, "the user's choice"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": None}, "OptimizerConfig.lr is None"),
        ({"clip_grad": 0.5}, "Remove clip_grad and set Trainer"),
        ({"optimizer": "muon"}, "optimizer='muon' is not supported: use 'adam' or 'sgd'"),
        ({"bf16": True}, r"OptimizerConfig.bf16=True with Trainer\(precision='32-true'\)"),
        (
            {"precision": "bf16-mixed", "fp16": True},
            r"OptimizerConfig.fp16=True with Trainer\(precision='bf16-mixed'\)",
        ),
        ({"params_dtype": torch.bfloat16}, "params_dtype=torch.bfloat16"),
        ({"loss_scale": 8.0}, r"loss_scale=8.0 with Trainer\(precision='32-true'\) does nothing"),
        ({"precision": "bf16-mixed", "hysteresis": 5}, "hysteresis=5 .* does nothing"),
        ({"precision": "16-mixed", "loss_scale": -1.0}, "loss_scale=-1.0 must be above 0"),
        ({"precision": "16-mixed", "initial_loss_scale": 0.5, "min_loss_scale": 2.0}, "initial_loss_scale=0.5 < min"),
        (
            {"precision": "16-mixed", "loss_scale_window": 0},
            "loss_scale_window=0 must be at least 1: it is a number of steps",
        ),
        ({"overlap_param_gather": True}, "overlap_param_gather=True does nothing by itself"),
        ({"overlap_param_gather_with_optimizer_step": True}, "overlap_param_gather_with_optimizer_step=True"),
        ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload=True does nothing on 'cpu'"),
        ({"optimizer_offload_fraction": 0.5}, "optimizer_offload_fraction=0.5 does nothing on 'cpu'"),
        ({"min_lr": 1e-5}, "min_lr=1e-05 does nothing here: .*lr_scheduler"),
        ({"optimizer_cuda_graph": True}, "optimizer_cuda_graph=True"),
    ],
)
def test_optimizer_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        optimizer(**options)


def test_sgd_that_passes_bf16_parameters_over_is_refused(monkeypatch):
    """Transformer Engine's, which is not installed here: it goes through fp16 and fp32 parameters alone."""
    from megatron.core import optimizer as core

    options: dict[str, Any] = {"precision": "bf16-true", "sharded": False, "optimizer": "sgd"}
    assert optimizer(**options).optimizer == "sgd"
    monkeypatch.setattr(core, "SGD", type("FusedSGD", (torch.optim.SGD,), {}))
    with pytest.raises(ValueError, match="leaves bf16 ones as they are"):
        optimizer(**options)


OFFLOADED = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "use_precision_aware_optimizer": True,
    "use_distributed_optimizer": True,  # Megatron's config asks for it
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "32-true"}, r"precision='32-true'\): .*full-precision copy beside each parameter"),
        ({"sharded": False}, "use_distributed_optimizer=False: only the distributed optimizer"),
        ({"use_precision_aware_optimizer": False}, "without use_precision_aware_optimizer=True: .*stale ones"),
        ({"optimizer_offload_fraction": 0.0}, "optimizer_offload_fraction=0.0: it is the share"),
        ({"optimizer_offload_fraction": 1.5}, "optimizer_offload_fraction=1.5 must be in"),
        ({"decoupled_weight_decay": False}, "decoupled_weight_decay=False: the host has AdamW"),
        (
            {"exp_avg_dtype": torch.bfloat16},
            "exp_avg_dtype=torch.bfloat16 with optimizer_cpu_offload=True",
        ),
        (
            {"optimizer_cpu_offload": False, "use_precision_aware_optimizer": False},
            "optimizer_offload_fraction=1.0 does nothing without optimizer_cpu_offload",
        ),
    ],
)
def test_offloaded_optimizers_that_megatron_gets_wrong_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        optimizer(**{"precision": "bf16-mixed", "device": "cuda", **OFFLOADED, **options})


def test_offloaded_optimizer_is_passed_on():
    config = optimizer("bf16-mixed", device="cuda", **OFFLOADED)
    assert (config.optimizer_cpu_offload, config.optimizer_offload_fraction) == (True, 1.0)


def test_precision_in_megatrons_terms():
    flags = {}
    for precision in DTYPES:
        config = optimizer(precision, sharded=precision != "bf16-true")
        flags[precision] = (config.bf16, config.fp16)
        assert config.params_dtype == DTYPES[precision]
        assert config.clip_grad == math.inf
    # bf16 is Megatron's word for fp32 main parameters beside bf16 ones
    assert flags == {
        "32-true": (False, False),
        "bf16-mixed": (True, False),
        "bf16-true": (False, False),
        "16-mixed": (False, True),
    }


def test_loss_scale_starts_where_sums_over_tokens_fit_into_fp16():
    assert (optimizer("16-mixed").initial_loss_scale, optimizer("16-mixed").min_loss_scale) == (2.0**8, 2.0**-16)
    chosen = optimizer("16-mixed", initial_loss_scale=64.0, min_loss_scale=0.5)
    assert (chosen.initial_loss_scale, chosen.min_loss_scale) == (64.0, 0.5)


def test_bf16_true_says_which_weights_stand_still():
    with pytest.warns(UserWarning, match=r"weights larger than 512 x 0.001 = 0.512 stand still"):
        optimizer("bf16-true", sharded=False)
    # the claim: half the distance between bf16 numbers at w is more than w / 512
    weight = torch.linspace(0.6, 100.0, 5000).bfloat16()
    assert torch.equal(weight - weight / 520, weight)
    assert torch.equal(weight + weight / 520, weight)


def test_every_rule_names_a_field_of_megatrons():
    """Fails when Megatron renames a field: the rule would be for nothing."""
    for rules, config in ((DDP_RULES, DistributedDataParallelConfig), (OPTIMIZER_RULES, OptimizerConfig)):
        names = {field.name for field in fields(config)}
        for rule in rules:
            assert rule in names or any(name.startswith(rule.removesuffix("*")) for name in names if "*" in rule), rule


def test_configs_of_another_class_are_refused():
    with pytest.raises(TypeError, match=r"^MegatronStrategy: ddp_config is to be DistributedDataParallelConfig\("):
        resolve_ddp_config(
            {"overlap_grad_reduce": True},  # type: ignore[arg-type]
            precision="32-true",
            use_distributed_optimizer=True,
            device=torch.device("cpu"),
        )
    with pytest.raises(TypeError, match=r"^MegatronStrategy: nodes is to be NodeSettings\(\.\.\.\), not a dict\."):
        MegatronStrategy(nodes={"timeout_s": 1.0})  # type: ignore[arg-type]
