"""Which families take which fused kernels, and what is set for experts."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_megatron_rl.models.hf.model import HFModel
from lightning_megatron_rl.models.layers.fusions import (
    EXPERTS_ENVIRONMENT,
    WITHOUT_TRANSFORMER_ENGINE,
    fused_kernels,
    fuses_gradients,
    tune_for_experts,
)
from tests.tiny_models import save_tiny_model

CPU = torch.device("cpu")
ROPE, SWIGLU = "apply_rope_fusion", "bias_activation_fusion"
FUSED = {
    "qwen3": {ROPE, SWIGLU},
    "qwen2_tied": {ROPE, SWIGLU},
    "qwen3_moe": {ROPE, SWIGLU},
    "llama": {ROPE, SWIGLU},
    "deepseek_v3": {SWIGLU},  # latent attention
    "gemma3": set(),  # GELU, and two rotations
    "gpt_oss": set(),  # YaRN, whose factor the kernel leaves out, and a clamped activation
}


@pytest.mark.parametrize("family", FUSED)
def test_families_take_what_computes_the_same(tmp_path, family):
    model = HFModel(str(save_tiny_model(tmp_path, family)))
    provider = model._bridge.to_megatron_provider(load_weights=False)
    kind = {"fused_rope": model.family.fused_rope}
    assert fused_kernels("transformer_engine", provider, {}, **kind) == dict.fromkeys(FUSED[family], True)
    assert fused_kernels("torch", provider, {}, **kind) == WITHOUT_TRANSFORMER_ENGINE
    taken = fused_kernels("transformer_engine", provider, {"use_te_activation_func": True}, **kind)
    assert taken.keys() == FUSED[family] - {SWIGLU}


def test_experts_are_computed_fast_unless_the_user_says_otherwise():
    with patch.dict(os.environ, {"NVTE_USE_CUTLASS_GROUPED_GEMM": "0"}):
        os.environ.pop("CUBLASLT_HEURISTICS_CACHE_CAPACITY", None)
        for backend, experts in (("torch", 8), ("transformer_engine", None), ("transformer_engine", 0)):
            tune_for_experts(backend, experts)
            assert "CUBLASLT_HEURISTICS_CACHE_CAPACITY" not in os.environ
        tune_for_experts("transformer_engine", 8)
        assert {name: os.environ[name] for name in EXPERTS_ENVIRONMENT} == {
            "NVTE_USE_CUTLASS_GROUPED_GEMM": "0",
            "CUBLASLT_HEURISTICS_CACHE_CAPACITY": "1048576",
        }


class BeforeTheModelError(Exception):
    """Transformer Engine's layers cannot be built on a CPU; what is looked at comes before."""


def environment_of_build(model: Path) -> dict[str, str]:
    """What is set when a model of Transformer Engine's layers would be built."""
    from megatron.core import parallel_state

    from lightning_megatron_rl.compat.cpu import install_cpu_support
    from lightning_megatron_rl.models.hf import model as hf_model

    install_cpu_support(CPU)
    parallel_state.initialize_model_parallel()
    with (
        patch.dict(os.environ),
        patch.object(hf_model, "resolve_layer_backend", lambda *args, **kwargs: "transformer_engine"),
        patch.object(HFModel, "check_layout", side_effect=BeforeTheModelError),
    ):
        for name in EXPERTS_ENVIRONMENT:
            os.environ.pop(name, None)
        with pytest.raises(BeforeTheModelError):
            HFModel(str(model)).build_chunks(
                params_dtype=torch.bfloat16, layer_backend="auto", device=CPU, sequence_parallel=False
            )
        return {name: os.environ[name] for name in EXPERTS_ENVIRONMENT if name in os.environ}


def test_every_rank_sets_it_before_it_builds_experts(worker_pool, checkpoint):
    assert worker_pool.run(environment_of_build, checkpoint("qwen3_moe"), world_size=1) == [EXPERTS_ENVIRONMENT]
    assert worker_pool.run(environment_of_build, checkpoint("qwen3"), world_size=1) == [{}]


@pytest.mark.parametrize(
    ("backend", "asked", "has_adapters", "fused"),
    [
        ("transformer_engine", None, False, True),
        ("transformer_engine", False, False, False),
        ("transformer_engine", None, True, False),
        ("transformer_engine", True, True, True),
        ("torch", None, False, False),
    ],
)
def test_products_add_gradients_unless_told_otherwise(backend, asked, has_adapters, fused):
    assert fuses_gradients(backend, asked, has_adapters=has_adapters) is fused


def settings_of_build(model: Path, asked: bool | None, fused: bool) -> tuple[list[Any], bool, bool]:
    """What decides, what a built model's config says, and what its own output layer was built with."""
    from megatron.core import parallel_state

    from lightning_megatron_rl.compat.cpu import install_cpu_support
    from lightning_megatron_rl.models.hf import model as hf_model

    install_cpu_support(CPU)
    parallel_state.initialize_model_parallel()
    with patch.object(hf_model, "fuses_gradients", return_value=fused) as decide:
        (chunk,) = HFModel(str(model)).build_chunks(
            params_dtype=torch.float32,
            layer_backend="auto",
            device=CPU,
            sequence_parallel=False,
            config_overrides={"gradient_accumulation_fusion": asked},
        )
    built = chunk.output_layer.gradient_accumulation_fusion
    return list(decide.call_args.args), chunk.config.gradient_accumulation_fusion, built


@pytest.mark.parametrize(("asked", "fused"), [(False, False), (None, True)])
def test_the_model_says_whether_its_products_add_gradients(worker_pool, qwen3_dir, asked, fused):
    """Megatron's own layers would refuse to be built without an extension of Apex."""
    found = worker_pool.run(settings_of_build, qwen3_dir, asked, fused, world_size=1)
    assert found == [(["torch", asked], fused, False)]
