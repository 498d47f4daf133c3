"""Transformer Engine: fp8 against bf16, fused gradients, checkpoints of other backends and layouts."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_megatron_rl.models.layers.fusions import EXPERTS_ENVIRONMENT
from lightning_megatron_rl.verify.pool import WorkerPool
from tests.convert.jobs import assert_same_tensors, must_convert, tensors
from tests.gpu.machine import needs_processes
from tests.tiny_models import make_tokenizer, save_tiny_model, tiny_config
from tests.training import Run, fit_arithmetic, fit_sft

pytestmark = pytest.mark.deadline(400)
ONE = {"world_size": 1, "init_process_group": False, "timeout": 300}
FP8_STEPS = 20
# products of operands with 3 (e4m3) and 2 (e5m2) bits of mantissa, in sums of 64 to 128: errors of a few percent in
# logits, of which the mean loss over hundreds of tokens keeps less
FP8_RELATIVE = 5e-2
BF16_RELATIVE = 2e-2  # two backends round differently in every layer
EXPERTS_RELATIVE = 5e-2  # two backends round differently, and tokens of which two experts score alike go elsewhere


def fit_te(model: Path, world_size: int, config: dict[str, Any], steps: int) -> Run:
    """SFT with Transformer Engine in bf16, with more of its settings."""
    module = {"layer_backend": "transformer_engine", "model_config": config, "max_tokens_per_microbatch": 128}
    trainer = {"accelerator": "cuda", "precision": "bf16-mixed"}
    return fit_sft(model, {}, world_size, steps=steps, module=module, trainer=trainer)


@pytest.fixture(scope="module")
def in_bf16(gpu_pool, qwen3_dir) -> Run:
    return gpu_pool.run(fit_te, qwen3_dir, 1, {}, FP8_STEPS, **ONE)[0]


@pytest.mark.parametrize(
    "recipe",
    [
        {"fp8_recipe": "delayed", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"},
        {"fp8_recipe": "tensorwise"},
    ],
    ids=["delayed scaling", "current scaling"],
)
def test_fp8_trains_as_bf16_does(gpu_pool, qwen3_dir, in_bf16, recipe):
    run = gpu_pool.run(fit_te, qwen3_dir, 1, {"fp8": "hybrid", **recipe}, FP8_STEPS, **ONE)[0]
    losses = [step["policy/loss"] for step in run.steps]
    expected = [step["policy/loss"] for step in in_bf16.steps]
    assert losses != expected  # it did compute in fp8
    for mine, theirs in zip(losses, expected, strict=True):
        assert abs(mine / theirs - 1) < FP8_RELATIVE


def continue_elsewhere(model: Path, world_size: int, checkpoints: Path, backend: str, ckpt_path: str | None) -> Run:
    """Four steps with a checkpoint after each, or the rest of them from a checkpoint."""
    return fit_arithmetic(
        model,
        {},
        world_size,
        max_steps=4,
        checkpoints=None if ckpt_path else checkpoints,
        ckpt_path=ckpt_path,
        trainer={"accelerator": "cuda", "precision": "bf16-mixed"},
        module={"layer_backend": backend},
    )


@pytest.mark.parametrize(("first", "second"), [("torch", "transformer_engine"), ("transformer_engine", "torch")])
def test_checkpoints_move_between_backends(gpu_pool, qwen3_dir, tmp_path, first, second):
    """Weights and optimizer: the two last steps are those that the other backend would have taken."""
    whole = gpu_pool.run(continue_elsewhere, qwen3_dir, 1, tmp_path, first, None, **ONE)[0]
    path = str(tmp_path / "step=2.ckpt")
    rest = gpu_pool.run(continue_elsewhere, qwen3_dir, 1, tmp_path, second, path, **ONE)[0]
    assert len(rest.steps) == 2
    for mine, theirs in zip(rest.steps, whole.steps[2:], strict=True):
        for name in ("policy/loss", "policy/grad_norm"):
            assert abs(mine[name] / theirs[name] - 1) < BF16_RELATIVE


def test_checkpoint_of_transformer_engine_is_converted(gpu_pool, worker_pool, qwen3_dir, tmp_path):
    """Converted in a process for the CPU: the one that converts can run nothing on CUDA any more."""
    run = gpu_pool.run(continue_elsewhere, qwen3_dir, 1, tmp_path, "transformer_engine", None, **ONE)[0]
    must_convert(worker_pool, tmp_path / "step=4.ckpt", tmp_path / "hf", "--verify")
    assert_same_tensors(tensors(tmp_path / "hf"), {name: weight.cpu() for name, weight in run.weights.items()})


def fit_layout(
    model: Path, world_size: int, strategy: dict[str, Any], checkpoints: Path | None, ckpt_path: str | None
) -> Run:
    return fit_arithmetic(
        model,
        strategy,
        world_size,
        max_steps=4,
        checkpoints=checkpoints,
        ckpt_path=ckpt_path,
        trainer={"accelerator": "cuda", "precision": "bf16-mixed"},
    )


@needs_processes(2)
@pytest.mark.parametrize("layout", [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {}])
def test_resumes_in_another_layout(gpu_pool, qwen3_dir, tmp_path, layout):
    """Saved on one GPU, resumed on two with tensor, pipeline or data parallelism."""
    check_resume(gpu_pool, qwen3_dir, tmp_path, layout, BF16_RELATIVE)


@needs_processes(2)
def test_mixture_resumes_with_its_experts_on_two_gpus(gpu_pool, tmp_path):
    model = save_tiny_model(tmp_path / "model", "qwen3_moe")
    check_resume(gpu_pool, model, tmp_path / "ckpt", {"expert_model_parallel_size": 2}, EXPERTS_RELATIVE)


def check_resume(pool: WorkerPool, model: Path, checkpoints: Path, layout: dict[str, Any], relative: float) -> None:
    """Steps 3 and 4 on two GPUs from a checkpoint of one are those of one that went on."""
    whole = pool.run(fit_layout, model, 1, {}, checkpoints, None, **ONE)[0]
    path = str(checkpoints / "step=2.ckpt")
    rest = pool.run(fit_layout, model, 2, layout, None, path, **{**ONE, "world_size": 2})[0]
    for mine, theirs in zip(rest.steps, whole.steps[2:], strict=True):
        for name in ("policy/loss", "policy/grad_norm"):
            assert abs(mine[name] / theirs[name] - 1) < relative


# In the first step what differs is a rounding of each micro-batch's gradient to bf16: up to 2^-9 of an element, at
# random, in a norm over ten thousands of elements. A gradient that is added twice, or not at all, is off by far more.
# Then weights differ in their last bits, 8-bit operands are rounded otherwise, and a token may go to another expert:
# `BF16_RELATIVE`.
FUSED_RELATIVE = 2e-3
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("dense", {}, {}),
    "dense, overlapped": ("dense", {"overlap_grad_reduce": True, "overlap_param_gather": True}, {}),
    "dense, fp8": ("dense", {}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
    "experts": ("experts", {}, {}),
    "experts, one by one": ("experts", {}, {"moe_grouped_gemm": False}),
}


class FusedLayers(pl.Callback):
    """Which layers add gradients themselves, and what the experts' products are told."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        layers = [layer for layer in module.model.modules() if hasattr(layer, "fuse_wgrad_accumulation")]
        self.found["fused"] = [layer.fuse_wgrad_accumulation for layer in layers]
        self.found["grouped"] = any(type(layer).__name__.endswith("GroupedLinear") for layer in layers)
        self.found["environment"] = {name: os.environ.get(name) for name in EXPERTS_ENVIRONMENT}


def fit_in_parts(
    model: Path, world_size: int, ddp: dict[str, Any], config: dict[str, Any], backend: str = "transformer_engine"
) -> Run:
    """Three steps of several micro-batches each."""
    from megatron.core.distributed import DistributedDataParallelConfig

    seen = FusedLayers()
    run = fit_sft(
        model,
        {"ddp_config": DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp)},
        world_size,
        steps=3,
        batch_size=8,
        module={"layer_backend": backend, "model_config": config, "max_tokens_per_microbatch": 64},
        trainer={"accelerator": "cuda", "precision": "bf16-mixed"},
        callbacks=[seen],
    )
    run.extra.update(seen.found)
    return run


def differences(run: Run, reference: Run) -> list[float]:
    """The larger one of loss and gradient norm in each step, relative."""
    return [
        max(abs(mine[name] / theirs[name] - 1) for name in ("policy/loss", "policy/grad_norm"))
        for mine, theirs in zip(run.steps, reference.steps, strict=True)
    ]


@pytest.fixture(scope="module")
def wide_models(qwen3_dir, tmp_path_factory) -> dict[str, Path]:
    """The second has widths that CUTLASS's grouped product takes: multiples of 128."""
    config = tiny_config("qwen3_moe")
    config.update({"hidden_size": 128, "moe_intermediate_size": 128})
    directory = tmp_path_factory.mktemp("wide")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return {"dense": qwen3_dir, "experts": directory}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_added_in_products_are_those_added_after(gpu_pool, wide_models, variant):
    family, ddp, config = VARIANTS[variant]
    apart = {**config, "gradient_accumulation_fusion": False}
    fused = gpu_pool.run(fit_in_parts, wide_models[family], 1, ddp, config, **ONE)[0]
    reference = gpu_pool.run(fit_in_parts, wide_models[family], 1, ddp, apart, **ONE)[0]
    assert set(fused.extra["fused"]) == {True}
    assert set(reference.extra["fused"]) == {False}
    first, *later = differences(fused, reference)
    assert first < FUSED_RELATIVE
    assert max(later) < BF16_RELATIVE


def test_experts_in_one_kernel_train_as_torch_layers_do(gpu_pool, wide_models):
    """On a Hopper GPU the experts' products are CUTLASS's."""
    grouped = gpu_pool.run(fit_in_parts, wide_models["experts"], 1, {}, {}, **ONE)[0]
    torch_layers = gpu_pool.run(fit_in_parts, wide_models["experts"], 1, {}, {}, "torch", **ONE)[0]
    assert grouped.extra["grouped"]
    assert grouped.extra["environment"] == EXPERTS_ENVIRONMENT
    assert max(differences(grouped, torch_layers)) < EXPERTS_RELATIVE


def fit_with_snapshot(model: Path, world_size: int, directory: Path) -> list[str]:
    """Two steps, the second one of them recorded."""
    from lightning_megatron_rl.callbacks.memory_snapshot import MemorySnapshot

    callbacks: list[Any] = [MemorySnapshot(str(directory), steps=[1])]
    fit_sft(model, {}, world_size, callbacks=callbacks, trainer={"accelerator": "cuda"})
    return [path.name for path in directory.iterdir() if path.stat().st_size > 0]


def test_memory_snapshot_is_written(gpu_pool, qwen3_dir, tmp_path):
    assert gpu_pool.run(fit_with_snapshot, qwen3_dir, 1, tmp_path, **ONE)[0] == ["step=1.rank=0.pickle"]
