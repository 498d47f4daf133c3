"""SFT on CUDA: the numbers of the CPU in fp32, and Transformer Engine's against torch's."""

from pathlib import Path
from typing import Any

import pytest

from tests.training import Run, fit_sft

pytestmark = pytest.mark.deadline(400)
CUDA = {"accelerator": "cuda"}
FP32_RELATIVE = 1e-4  # other kernels, whose sums have another order
# products with 10 bits of mantissa instead of 23: a loss of about 5 keeps 3 digits
TF32_RELATIVE = 5e-3
# two backends in bf16 (8 bits) round differently in every layer
BF16_RELATIVE = 2e-2


def fit_on_cuda(model: Path, variants: list[dict[str, Any]], world_size: int) -> list[Run]:
    """One SFT run of two steps per variant."""
    runs = []
    for variant in variants:
        trainer = {**CUDA, **variant.get("trainer", {})}
        strategy = variant.get("strategy", {})
        runs.append(fit_sft(model, strategy, world_size, module=variant.get("module"), trainer=trainer))
    return runs


def backend(name: str, precision: str = "32-true") -> dict[str, Any]:
    return {"module": {"layer_backend": name}, "trainer": {"precision": precision}}


@pytest.fixture(scope="module")
def cpu_run(worker_pool, qwen3_dir) -> Run:
    return worker_pool.run(fit_sft, qwen3_dir, {}, 1, world_size=1, init_process_group=False)[0]


def relative_steps(run: Run, reference: Run) -> float:
    """Largest relative difference of loss and gradient norm over the steps."""
    return max(
        abs(mine[name] / theirs[name] - 1)
        for mine, theirs in zip(run.steps, reference.steps, strict=True)
        for name in ("policy/loss", "policy/grad_norm")
    )


def test_torch_backend_gives_the_numbers_of_the_cpu(gpu_pool, qwen3_dir, cpu_run):
    (run,) = gpu_pool.run(fit_on_cuda, qwen3_dir, [backend("torch")], 1, world_size=1, init_process_group=False)[0]
    assert relative_steps(run, cpu_run) < FP32_RELATIVE
    for name, weight in cpu_run.weights.items():
        assert (run.weights[name].cpu() - weight).norm() / weight.norm() < FP32_RELATIVE, name


@pytest.mark.smoke
def test_transformer_engine_trains_as_torch_does(gpu_pool, qwen3_dir, cpu_run):
    variants = [
        backend("transformer_engine"),
        backend("torch", "bf16-mixed"),
        backend("transformer_engine", "bf16-mixed"),
    ]
    te, torch_bf16, te_bf16 = gpu_pool.run(
        fit_on_cuda, qwen3_dir, variants, 1, world_size=1, init_process_group=False, timeout=300
    )[0]
    assert relative_steps(te, cpu_run) < FP32_RELATIVE
    assert relative_steps(te_bf16, torch_bf16) < BF16_RELATIVE
    assert relative_steps(te_bf16, cpu_run) < 2 * BF16_RELATIVE
