"""Training on CUDA: the numbers of the CPU in fp32, Transformer Engine's against torch's, updates without a pass."""

from pathlib import Path
from typing import Any

import pytest

from tests.modules.runs import fit_grpo
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


def fit_both_ways(model: Path, precision: str) -> list[Run]:
    """GRPO with one update per rollout: by itself, and after a pass for the old policy's log-probs."""
    from lightning_megatron_rl.modules.grpo import GRPOModule

    class ScoresFirst(GRPOModule):
        scores_first = True

    trainer = {**CUDA, "precision": precision}
    return [
        fit_grpo(model, {}, 1, make_module=kind, module={"updates_per_rollout": 1}, trainer=trainer)
        for kind in (GRPOModule, ScoresFirst)
    ]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_single_update_needs_no_pass_before_it(gpu_pool, qwen3_dir, precision):
    """The pass and the update have the same kernels on the same micro-batches.

    Sums of gradients may change order from run to run, after which a few weights round the other way: 1e-4.
    """
    alone, scored = gpu_pool.run(fit_both_ways, qwen3_dir, precision, world_size=1, init_process_group=False)[0]
    names = ("policy/loss", "policy/grad_norm", "mismatch/abs_logp_diff", "mismatch/is_max", "mismatch/ess")
    for mine, theirs in zip(alone.steps, scored.steps, strict=True):
        assert ("time/old_logp_s" in mine, "time/old_logp_s" in theirs) == (False, True)
        for name in names:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
