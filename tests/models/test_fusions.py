"""Which families take which fused kernels."""

import pytest

from lightning_megatron_rl.models.fusions import WITHOUT_TRANSFORMER_ENGINE, fused_kernels
from lightning_megatron_rl.models.hf_model import HFModel
from tests.tiny_models import save_tiny_model

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
