"""Transformer Engine in fp8 against bf16, checkpoints from one layer backend to the other and from layout to layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.convert.jobs import assert_same_tensors, must_convert, tensors
from tests.training import Run, fit_arithmetic, fit_sft

pytestmark = pytest.mark.deadline(400)
ONE = {"world_size": 1, "init_process_group": False, "timeout": 300}
FP8_STEPS = 20
# products of operands with 3 (e4m3) and 2 (e5m2) bits of mantissa, in sums of 64 to 128: errors of a few percent in
# logits, of which the mean loss over hundreds of tokens keeps less
FP8_RELATIVE = 5e-2
BF16_RELATIVE = 2e-2  # two backends round differently in every layer


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


@pytest.mark.parametrize("layout", [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {}])
def test_resumes_in_another_layout(gpu_pool, qwen3_dir, tmp_path, layout):
    """Saved on one GPU, resumed on two with tensor, pipeline or data parallelism."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, this machine has {torch.cuda.device_count()}")
    whole = gpu_pool.run(fit_layout, qwen3_dir, 1, {}, tmp_path, None, **ONE)[0]
    path = str(tmp_path / "step=2.ckpt")
    rest = gpu_pool.run(fit_layout, qwen3_dir, 2, layout, None, path, **{**ONE, "world_size": 2})[0]
    for mine, theirs in zip(rest.steps, whole.steps[2:], strict=True):
        for name in ("policy/loss", "policy/grad_norm"):
            assert abs(mine[name] / theirs[name] - 1) < BF16_RELATIVE


def fit_with_snapshot(model: Path, world_size: int, directory: Path) -> list[str]:
    """Two steps, the second one of them recorded."""
    from lightning_megatron_rl.callbacks.memory_snapshot import MemorySnapshot

    callbacks: list[Any] = [MemorySnapshot(str(directory), steps=[1])]
    fit_sft(model, {}, world_size, callbacks=callbacks, trainer={"accelerator": "cuda"})
    return [path.name for path in directory.iterdir() if path.stat().st_size > 0]


def test_memory_snapshot_is_written(gpu_pool, qwen3_dir, tmp_path):
    assert gpu_pool.run(fit_with_snapshot, qwen3_dir, 1, tmp_path, **ONE)[0] == ["step=1.rank=0.pickle"]
