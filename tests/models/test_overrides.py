"""Overrides of the model's config: each field does something on a device, is warned about, or is refused."""

from typing import Any

import pytest
import torch

from lightning_megatron_rl.models.overrides import RULES, LayerParts, check_overrides, check_recompute
from tests.distributed import WorkerError, WorkerPool
from tests.tiny_models import save_without_numbers

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
REFUSED_ON_CPU: list[tuple[dict[str, Any], str]] = [
    ({"fp8": "hybrid"}, r"fp8='hybrid' .*it needs train.layer_backend='transformer_engine'.*use bf16-mixed"),
    ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "fp8='hybrid'"),
    ({"fp4": "e2m1"}, "fp4='e2m1'"),
    ({"cpu_offloading": True, "cpu_offloading_num_layers": 1}, "cpu_offloading=True"),
    ({"attention_backend": "flash"}, "attention_backend="),
    ({"fine_grained_activation_offloading": True}, "fine_grained_activation_offloading=True"),
    ({"activation_func_fp8_input_store": True}, "activation_func_fp8_input_store=True"),
]
REFUSED_EVERYWHERE: list[tuple[dict[str, Any], str]] = [
    ({"tp_comm_overlap": True}, "tp_comm_overlap=True does nothing here: its buffers have one length"),
    ({"enable_cuda_graph": True}, "enable_cuda_graph=True does nothing here: micro-batches differ in length"),
    ({"cuda_graph_impl": "local"}, "cuda_graph_impl='local'"),
    ({"cross_entropy_loss_fusion": True}, "cross_entropy_loss_fusion=True does nothing here: log-probs"),
    ({"flash_decode": True}, "flash_decode=True"),
    ({"transformer_impl": "local"}, "set train.layer_backend"),
    ({"overlap_moe_expert_parallel_comm": True}, "another schedule"),
    ({"fp8_recipe": "tensorwise"}, r"fp8_recipe='tensorwise' does nothing without fp8: set fp8='hybrid'"),
    ({"attention_backend": "flashy"}, "attention_backend='flashy' is none of flash, fused"),
]
DROPPED_ON_CPU = (
    "apply_rope_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "gradient_accumulation_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
)


@pytest.mark.parametrize(("overrides", "message"), REFUSED_ON_CPU)
def test_needs_transformer_engine_or_cuda(overrides, message):
    with pytest.raises(ValueError, match=message):
        check_overrides(overrides, device=CPU, transformer_engine=False)
    kept = check_overrides(overrides, device=CUDA, transformer_engine=True)
    assert kept.keys() == overrides.keys()


@pytest.mark.parametrize(("overrides", "message"), REFUSED_EVERYWHERE)
def test_never_works(overrides, message):
    for device, transformer_engine in ((CPU, False), (CUDA, True)):
        with pytest.raises(ValueError, match=message):
            check_overrides(overrides, device=device, transformer_engine=transformer_engine)


@pytest.mark.parametrize("name", DROPPED_ON_CPU)
def test_only_speed_is_warned_about(name):
    with pytest.warns(UserWarning, match=rf"model_config: {name}=True does nothing .*It is left out"):
        assert check_overrides({name: True, "add_bias_linear": False}, device=CPU, transformer_engine=False) == {
            "add_bias_linear": False
        }
    assert check_overrides({name: False}, device=CPU, transformer_engine=False) == {name: False}


def test_layers_of_transformer_engine_can_add_gradients_themselves():
    asked = {"gradient_accumulation_fusion": True}
    assert check_overrides(asked, device=CUDA, transformer_engine=True) == asked


def test_the_name_of_an_attention_kernel_becomes_megatrons_enum():
    from megatron.core.transformer.enums import AttnBackend

    kept = check_overrides({"attention_backend": "fused"}, device=CUDA, transformer_engine=True)
    assert kept == {"attention_backend": AttnBackend.fused}
    assert check_overrides({"attention_backend": "auto"}, device=CPU, transformer_engine=False)


def test_every_rule_names_a_field_of_megatrons():
    """Fails when Megatron renames a field: the rule would be for nothing."""
    from dataclasses import fields

    from megatron.core.transformer.transformer_config import TransformerConfig

    names = {field.name for field in fields(TransformerConfig)}
    for rule in RULES:
        assert rule in names or any(name.startswith(rule.removesuffix("*")) for name in names if "*" in rule), rule


DENSE = LayerParts()
MOE = LayerParts(experts=True, dense_mlp=False)
SHARED = LayerParts(experts=True, shared_experts=True, latent_attention=True)
GROUPED = LayerParts(experts=True, dense_mlp=False, grouped_experts=True)
FULL = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
BAD_RECOMPUTE: list[tuple[dict[str, Any], LayerParts, str]] = [
    ({"recompute_method": "uniform"}, DENSE, "recompute_method='uniform' with recompute_granularity=None does nothing"),
    ({"recompute_num_layers": 1}, DENSE, "recompute_num_layers=1 with recompute_granularity=None does nothing"),
    ({"recompute_modules": ["mlp"]}, DENSE, "belongs to recompute_granularity='selective'"),
    ({**FULL, "recompute_modules": ["mlp"]}, DENSE, "with recompute_granularity='full' does nothing"),
    ({**SELECTIVE, "recompute_method": "uniform"}, DENSE, "belongs to recompute_granularity='full'"),
    ({"recompute_granularity": "all"}, DENSE, "'all' is none of 'full', 'selective'"),
    ({**FULL, "recompute_method": None}, DENSE, "recompute_method=None: set it to 'uniform'"),
    ({**FULL, "recompute_num_layers": None}, DENSE, "recompute_num_layers=None: set it to a number"),
    ({**FULL, "recompute_num_layers": 0}, DENSE, "recompute_num_layers=0: set it to a number"),
    ({**SELECTIVE, "recompute_modules": ["attention"]}, DENSE, "'attention' in recompute_modules is none of core_attn"),
    ({**SELECTIVE, "recompute_modules": "mlp"}, DENSE, "recompute_modules='mlp' is not a list"),
    ({**SELECTIVE, "recompute_modules": []}, DENSE, "is not a list of one or more"),
    ({**SELECTIVE, "recompute_modules": ["moe"]}, DENSE, "'moe' in recompute_modules does nothing: .*use 'mlp'"),
    ({**SELECTIVE, "recompute_modules": ["layernorm"]}, DENSE, "'layernorm' .*part of the linear layers"),
    ({**SELECTIVE, "recompute_modules": ["mla_up_proj"]}, DENSE, "no latent attention"),
    ({**SELECTIVE, "recompute_modules": ["mlp"]}, MOE, "every layer has experts: use 'moe'"),
    ({**SELECTIVE, "recompute_modules": ["moe_act"]}, DENSE, "'moe_act' .*no experts: use 'mlp'"),
    ({**SELECTIVE, "recompute_modules": ["moe_act"]}, SHARED, "'moe_act' .*one after the other, .*: use 'moe'"),
    ({**SELECTIVE, "recompute_modules": ["shared_experts"]}, DENSE, "'shared_experts' .*no experts: use 'mlp'"),
    ({**SELECTIVE, "recompute_modules": ["moe", "shared_experts"]}, MOE, "'shared_experts' .*none that all tokens"),
]


@pytest.mark.parametrize(("overrides", "parts", "message"), BAD_RECOMPUTE)
def test_recompute_that_lacks_a_part_is_refused(overrides, parts, message):
    with pytest.raises(ValueError, match=message):
        check_recompute(overrides, parts)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({}, DENSE),
        (FULL, DENSE),
        (SELECTIVE, DENSE),
        ({**SELECTIVE, "recompute_modules": ["core_attn", "mlp"]}, DENSE),
        ({**SELECTIVE, "recompute_modules": ["layernorm", "moe"]}, MOE),
        ({**SELECTIVE, "recompute_modules": ["mlp", "shared_experts", "mla_up_proj"]}, SHARED),
        ({**SELECTIVE, "recompute_modules": ["moe_act"]}, GROUPED),
    ],
)
def test_complete_recompute_is_accepted(overrides, parts):
    check_recompute(overrides, parts)


def build(directory: str, overrides: dict[str, Any], fp16: bool = False) -> None:
    from megatron.core import parallel_state

    from lightning_megatron_rl.compat.cpu import install_cpu_support
    from lightning_megatron_rl.models.hf.model import HFModel

    install_cpu_support(CPU)
    parallel_state.initialize_model_parallel()
    HFModel(directory).build_chunks(
        params_dtype=torch.float16 if fp16 else torch.float32,
        layer_backend="auto",
        device=CPU,
        sequence_parallel=False,
        config_overrides=overrides,
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "fp8='hybrid' does nothing with torch layers on 'cpu'"),
        ({"recompute_method": "uniform"}, "recompute_method='uniform' with recompute_granularity=None"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
            "'layernorm' in recompute_modules",
        ),
    ],
)
def test_refused_before_a_weight_is_read(worker_pool: WorkerPool, qwen3_dir, tmp_path, overrides, message):
    """Reading this model's weights would raise another error."""
    directory = save_without_numbers(qwen3_dir, tmp_path / "model")
    with pytest.raises(WorkerError, match=f"ValueError: train.model_config: {message}"):
        worker_pool.run(build, str(directory), overrides, world_size=1)
