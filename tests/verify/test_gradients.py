"""An error of 0.1 % in the gradient of any one parameter on any one rank is named, and rounding is not."""

from functools import partial

import pytest
import torch

from lightning_megatron_rl.models.layers.moe import MoESettings
from lightning_megatron_rl.verify.report import Report
from lightning_megatron_rl.verify.runner import verify_layouts
from tests.verify.subjects import Fault, FaultySFT, sft

pytestmark = pytest.mark.deadline(600)  # a fixture runs a whole table of layouts, and may have to start the workers

# layout @ budget, which tells faults apart -> what is wrong, and the first parameter in which it shows
DENSE = {
    "dp2@64": (Fault("layers.1.self_attention.linear_qkv.layer_norm_weight"), "model.layers.1.input_layernorm.weight"),
    "dp2@65": (
        Fault("layers.1.self_attention.linear_qkv.layer_norm_weight", 1.01),
        "model.layers.1.input_layernorm.weight",
    ),
    "dp2_plain@66": (Fault("decoder.final_layernorm.weight", rank=0), "model.norm.weight"),
    "dp2@67": (Fault("layers.2.self_attention.linear_qkv.bias"), "model.layers.2.self_attn.k_proj.bias"),
    "dp2@68": (Fault("word_embeddings.weight", rows=slice(16, 32)), "model.embed_tokens.weight"),
    "pp2@69": (Fault("word_embeddings.weight", rank=0), "model.embed_tokens.weight"),
    "pp2@70": (Fault("output_layer.weight"), "model.embed_tokens.weight"),  # the other copy of a tied embedding
    "tp2@71": (Fault("layers.3.mlp.linear_fc1.layer_norm_weight"), "model.layers.3.post_attention_layernorm.weight"),
    "tp2_sp@72": (Fault("layers.0.self_attention.linear_proj.weight"), "model.layers.0.self_attn.o_proj.weight"),
    "cp2@73": (Fault("layers.0.self_attention.linear_qkv.layer_norm_weight"), "model.layers.0.input_layernorm.weight"),
    "dp2@80": (None, ""),
    "tp2_sp@80": (None, ""),
    "pp2@80": (None, ""),
}
EXPERTS = {
    "dp2@64": (Fault("layers.1.mlp.router.weight"), "model.layers.1.mlp.gate.weight"),
    "dp2@65": (
        Fault("layers.2.mlp.experts.local_experts.1.linear_fc2.weight"),
        "model.layers.2.mlp.experts.1.down_proj.weight",
    ),
    "ep2@66": (
        Fault("layers.0.mlp.experts.local_experts.1.linear_fc1.weight"),
        "model.layers.0.mlp.experts.3.gate_proj.weight",
    ),
    "tp2_sp@67": (Fault("layers.3.self_attention.q_layernorm.weight"), "model.layers.3.self_attn.q_norm.weight"),
    "ep2@80": (None, ""),
    "tp2_sp@80": (None, ""),
}


def faulty(pool, model, table, **options) -> Report:
    faults = {int(layout.partition("@")[2]): fault for layout, (fault, _) in table.items() if fault is not None}
    build = partial(sft, model, module=FaultySFT, faults=faults, **options)
    return verify_layouts(build, [*table], processes=2, steps=1, pool=pool)


@pytest.fixture(scope="module")
def dense(worker_pool, tied_dir) -> Report:
    return faulty(worker_pool, tied_dir, DENSE)


@pytest.fixture(scope="module")
def experts(worker_pool, qwen3_moe_dir) -> Report:
    return faulty(worker_pool, qwen3_moe_dir, EXPERTS, moe=MoESettings(aux_loss_coeff=0.0))


def assert_found(report: Report, table, layout: str) -> None:
    fault, name = table[layout]
    row = report[layout]
    if fault is None:
        assert row.verdict == "same", row.reason
        assert row.gradient_error is not None
        assert row.gradient_error < 1e-5  # the noise of these models' gradients is 1e-6 to 5e-6
        return
    assert row.verdict == "departs", f"{fault} was not found: {row}"
    assert f"the gradient of {name} departs by" in row.reason
    assert ("on rank 1" in row.reason) == (layout == "tp2@71"), "copies of rank 1 alone, which are not reduced"


@pytest.mark.parametrize("layout", DENSE)
def test_a_fault_in_a_dense_model_is_named(dense, layout):
    assert_found(dense, DENSE, layout)


@pytest.mark.parametrize("layout", EXPERTS)
@pytest.mark.slow
def test_a_fault_in_a_mixture_of_experts_is_named(experts, layout):
    assert_found(experts, EXPERTS, layout)


def test_no_parameter_is_blurred_in_this_model(dense):
    assert dense.blurred == []


@pytest.mark.slow
def test_no_parameter_is_blurred_in_this_mixture(experts):
    assert experts.blurred == []


@pytest.mark.parametrize("kind", ["dp2", "dp2_plain"])
def test_adapters_are_compared_by_their_own_names(worker_pool, qwen3_dir, kind):
    from lightning_megatron_rl.models.layers.lora import LoRASettings

    faults = {64: Fault("layers.1.mlp.linear_fc2.adapter.linear_out.weight")}
    build = partial(sft, qwen3_dir, module=FaultySFT, faults=faults, lora=LoRASettings(rank=2))
    report = verify_layouts(build, [f"{kind}@64", f"{kind}@80"], processes=2, steps=1, pool=worker_pool)
    assert "layers.1.mlp.down_proj.lora_B" in report[f"{kind}@64"].reason
    assert report[f"{kind}@80"].verdict == "same", report


def test_noise_is_that_of_rounding():
    """A unit in the last place, up or down, of every number; zeros stay."""
    from lightning_megatron_rl.verify.gradients import perturb

    layer = torch.nn.Linear(100, 100)
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.bias.zero_()
    perturb([layer], 0)
    relative = (layer.weight.detach() / before - 1).abs()
    assert 5e-8 < float(relative.mean()) < 2e-7
    assert float(relative.max()) < 3e-7
    assert not layer.bias.any()
