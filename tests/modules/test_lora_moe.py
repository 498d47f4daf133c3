"""Adapters on experts: one number in every layout, and what is exported is what was trained."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_megatron_rl.callbacks.hf_export import HFExport
from lightning_megatron_rl.models.layers.lora import LoRASettings
from lightning_megatron_rl.models.layers.moe import MoESettings
from tests.modules import test_lora
from tests.modules.test_moe import LAYOUTS as MOE_LAYOUTS
from tests.selection import by_default
from tests.strategy.test_megatron import RELATIVE, assert_same_run
from tests.training import Run, fit_sft, frozen_sequences

LAYOUTS = {
    **MOE_LAYOUTS,
    "tp2_sp_etp1": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}),
    "etp2": (2, {"expert_tensor_parallel_size": 2}),
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


# ---- training ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(worker_pool, qwen3_moe_dir) -> Run:
    return job(worker_pool, qwen3_moe_dir)[0]


@pytest.mark.parametrize("layout", by_default(["ep2"], ["ep2", "pp2", "tp2_sp", "dp2", "tp2_sp_etp1", "etp2"]))
def test_layout_gives_the_numbers_of_one_process(worker_pool, qwen3_moe_dir, reference, layout):
    """`tp2_sp` splits experts as well; `etp2` splits nothing else."""
    runs = job(worker_pool, qwen3_moe_dir, layout)
    assert_same_run(runs[0], reference)
    for run in runs:
        assert run.steps == runs[0].steps, "a rank logged something else"
        assert run.extra["base unchanged"]
        assert_same_adapters(run, reference)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [EXPERTS, ATTENTION], ids=["experts", "attention"])
@pytest.mark.parametrize("layout", by_default(["ep2"], ["ep2", "tp2_sp"]))
def test_parts_of_the_model(worker_pool, qwen3_moe_dir, layout, settings):
    alone = job(worker_pool, qwen3_moe_dir, settings=settings)[0]
    run = job(worker_pool, qwen3_moe_dir, layout, settings=settings)[0]
    assert_same_run(run, alone)
    assert_same_adapters(run, alone)


def test_only_adapters_are_trained(reference):
    assert reference.extra["base unchanged"]
    trained = reference.extra["with gradient buffers"]
    assert len(trained) == 4 * (2 + 4 * 2) * 2, "4 layers, 2 targets and 2 in each of 4 experts, A and B"
    assert all(".adapter." in name for name in trained)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(worker_pool, qwen3_moe_dir, tmp_path_factory) -> tuple[Path, Run]:
    """A checkpoint after step 1 of 3 under EP2, and the run that went on."""
    directory = tmp_path_factory.mktemp("saved")
    options = {**test_lora.resuming(directory), **test_lora.saving(directory), "ckpt_path": None}
    run = job(worker_pool, qwen3_moe_dir, "ep2", **options)[0]
    return directory / "step=1.ckpt", run


def test_checkpoint_holds_adapters_alone(saved):
    from megatron.core import dist_checkpointing

    path, run = saved
    tensors = dist_checkpointing.load_tensors_metadata(str(path / "sharded"))
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer")}
    assert all(".adapter." in name for name in tensors), list(tensors)
    assert len(weights) == 4 * 2, "targets; all layers, and all experts of them, are in one tensor"
    numbers = sum(math.prod(tensor.global_shape) for tensor in weights.values())
    copies = sum(t.numel() for name, t in run.extra["adapter"].items() if re.search(r"\.(k|v)_proj\.lora_A", name))
    assert numbers == sum(tensor.numel() for tensor in run.extra["adapter"].values()) - copies


@pytest.mark.parametrize("layout", by_default(["ep2"], ["ep2", "single", "tp2_sp"]))
def test_resumed_run_is_the_uninterrupted_one(worker_pool, qwen3_moe_dir, saved, layout):
    """Bitwise in the layout it was saved in, within rounding in others."""
    path, whole = saved
    resumed = job(worker_pool, qwen3_moe_dir, layout, **test_lora.resuming(path))[0]
    assert_same_run(resumed, Run(whole.steps[1:], whole.weights))
    assert resumed.extra["base unchanged"]
    assert_same_adapters(resumed, whole)
    if layout == "ep2":
        for name, tensor in whole.extra["adapter"].items():
            assert torch.equal(resumed.extra["adapter"][name], tensor), name
        assert [step["policy/grad_norm"] for step in resumed.steps] == [s["policy/grad_norm"] for s in whole.steps[1:]]


# ---- GRPO and exports ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", by_default(["ep2"], ["ep2", "tp2_sp"]))
def test_reference_is_the_policy_without_adapters(worker_pool, qwen3_moe_dir, layout):
    run = test_lora.grpo_job(worker_pool, qwen3_moe_dir, LAYOUTS[layout], module={"lora": ALL})
    assert run.extra["copies"] is None, "a second model was built"
    for reference, base, policy in zip(run.extra["reference"], run.extra["base"], run.extra["policy"], strict=True):
        assert torch.equal(reference, base)
        assert not torch.equal(reference, policy)
    assert run.extra["names"] == set(load_file(qwen3_moe_dir / "model.safetensors"))


@pytest.mark.parametrize("layout", by_default(["ep2"], ["ep2", "tp2_sp"]))
def test_exports_of_a_run_load_and_agree(worker_pool, qwen3_moe_dir, tmp_path, layout):
    """`HFExport` compares both with the trainer; here PEFT loads the one, Transformers the other."""
    callbacks = [HFExport(str(tmp_path), adapter="both")]
    options = {"optimizer": {"lr": 3e-2, "adam_eps": 1e-8}, "callbacks": callbacks}  # far from the base model
    job(worker_pool, qwen3_moe_dir, layout, **options)
    base = AutoModelForCausalLM.from_pretrained(qwen3_moe_dir, dtype=torch.float32).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "last", dtype=torch.float32).eval()
    tokens = frozen_sequences(1, seed=9)[0].token_ids[None]

    def score(model: Any) -> Tensor:
        with torch.no_grad():
            return model(tokens).logits.log_softmax(-1)

    before = score(base)
    adapted = PeftModel.from_pretrained(base, tmp_path / "last-adapter").eval()
    assert (score(merged) - score(adapted)).abs().max() <= 1e-5  # fp32, one product or two
    assert (score(merged) - before).abs().max() > 0.1


class Routers(Callback):
    """The rows of the table at start that are about routers."""

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.rows = dict(module.routers.describe())


def fit_by_default(model: Path, settings: MoESettings | None) -> tuple[list[dict[str, float]], dict[str, str]]:
    """Fine-tuning with adapters on attention, where a balance loss would have a gradient."""
    routers = Routers()
    module = {"moe": settings, "lora": ATTENTION}
    return fit_sft(model, {}, 1, steps=1, module=module, callbacks=[routers]).steps, routers.rows


def test_routers_beside_adapters_are_frozen_and_have_no_balance_loss_by_default(worker_pool, qwen3_moe_dir):
    """As with `freeze_router`: they do not learn."""
    alone = {"world_size": 1, "init_process_group": False}
    (steps, rows), (without, _), (asked, _) = (
        worker_pool.run(fit_by_default, qwen3_moe_dir, settings, **alone)[0]
        for settings in (None, MoESettings(aux_loss_coeff=0.0), MoESettings(aux_loss_coeff=0.3))
    )
    assert rows["router"].startswith("frozen")
    assert "aux_loss_coeff 0," in rows["router losses"]
    assert steps[0]["policy/grad_norm"] == without[0]["policy/grad_norm"] != asked[0]["policy/grad_norm"]
