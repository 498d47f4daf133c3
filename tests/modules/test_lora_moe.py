"""Adapters on experts: one number in every layout, and what is exported is what was trained."""

from pathlib import Path
from typing import Any

import pytest

from lightning_megatron_rl.models.lora import LoRASettings
from lightning_megatron_rl.models.moe import MoESettings
from tests.modules import test_lora
from tests.modules.test_moe import LAYOUTS as MOE_LAYOUTS
from tests.strategy.test_megatron import RELATIVE, assert_same_run
from tests.training import Run

LAYOUTS = {
    **MOE_LAYOUTS,
    "tp2_sp_etp1": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}),
}
ALL = LoRASettings(rank=4, alpha=8)
EXPERTS = LoRASettings(rank=4, alpha=8, target_modules=["*.experts.*"])
ATTENTION = LoRASettings(rank=4, alpha=8, target_modules=["*.self_attention.*"])


def job(pool: Any, model: Path, layout: str = "single", settings: LoRASettings = ALL, **kwargs: Any) -> list[Run]:
    """Fine-tuning without balance loss: that depends on the division into micro-batches."""
    module = {"moe": MoESettings(aux_loss_coeff=0.0), **kwargs.pop("module", {})}
    return test_lora.job(pool, model, LAYOUTS[layout], settings=settings, module=module, **kwargs)


def assert_same_adapters(run: Run, reference: Run) -> None:
    assert run.extra["adapter"].keys() == reference.extra["adapter"].keys()
    for name, tensor in reference.extra["adapter"].items():
        error = (run.extra["adapter"][name] - tensor).norm() / tensor.norm()
        assert error <= RELATIVE, f"{name}: {error:.1e}"


@pytest.fixture(scope="module")
def reference(worker_pool, qwen3_moe_dir) -> Run:
    return job(worker_pool, qwen3_moe_dir)[0]


@pytest.mark.parametrize("layout", ["ep2", "pp2", "dp2", "tp2_sp", "tp2_sp_etp1"])
def test_layout_gives_the_numbers_of_one_process(worker_pool, qwen3_moe_dir, reference, layout):
    """`tp2_sp` splits experts as well (ETP 2)."""
    runs = job(worker_pool, qwen3_moe_dir, layout)
    assert_same_run(runs[0], reference)
    for run in runs:
        assert run.steps == runs[0].steps, "a rank logged something else"
        assert run.extra["base unchanged"]
        assert_same_adapters(run, reference)


@pytest.mark.parametrize("settings", [EXPERTS, ATTENTION], ids=["experts", "attention"])
@pytest.mark.parametrize("layout", ["ep2", "tp2_sp"])
def test_parts_of_the_model(worker_pool, qwen3_moe_dir, layout, settings):
    alone = job(worker_pool, qwen3_moe_dir, settings=settings)[0]
    run = job(worker_pool, qwen3_moe_dir, layout, settings=settings)[0]
    assert_same_run(run, alone)
    assert_same_adapters(run, alone)
