"""Which families take which fused kernels, and which add gradients in their products."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_megatron_rl.models.fusions import (
    WITHOUT_TRANSFORMER_ENGINE,
    fused_kernels,
    fuses_gradients,
)
from lightning_megatron_rl.models.hf_model import HFModel
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
    kind = model.config.model_type
    assert fused_kernels("transformer_engine", provider, kind, {}) == dict.fromkeys(FUSED[family], True)
    assert fused_kernels("torch", provider, kind, {}) == WITHOUT_TRANSFORMER_ENGINE
    taken = fused_kernels("transformer_engine", provider, kind, {"use_te_activation_func": True})
    assert taken.keys() == FUSED[family] - {SWIGLU}


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
    from lightning_megatron_rl.models import hf_model

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
