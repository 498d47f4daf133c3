"""SFT and GRPO on CUDA: the numbers of the CPU in fp32, Transformer Engine's against torch's, and vLLM as sampler."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.modules.runs import parity, prompts
from tests.training import Recorder, Run, SequenceDataModule, fit_sft, make_trainer

pytestmark = pytest.mark.deadline(400)
CUDA = {"accelerator": "cuda"}
# TransformerEngine multiplies fp32 on tensor cores as TF32, with 10 bits of mantissa; a loss of about 5 keeps 3 digits
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
    assert relative_steps(run, cpu_run) < 1e-4  # fp32 on both, other kernels
    for name, weight in cpu_run.weights.items():
        assert (run.weights[name].cpu() - weight).norm() / weight.norm() < 1e-4, name


def test_transformer_engine_trains_as_torch_does(gpu_pool, qwen3_dir, cpu_run):
    variants = [
        backend("transformer_engine"),
        backend("torch", "bf16-mixed"),
        backend("transformer_engine", "bf16-mixed"),
    ]
    te, torch_bf16, te_bf16 = gpu_pool.run(
        fit_on_cuda, qwen3_dir, variants, 1, world_size=1, init_process_group=False, timeout=300
    )[0]
    assert relative_steps(te, cpu_run) < TF32_RELATIVE
    assert relative_steps(te_bf16, torch_bf16) < BF16_RELATIVE
    assert relative_steps(te_bf16, cpu_run) < 2 * BF16_RELATIVE


def memory_beside_torch(model: Path) -> int:
    """Bytes that a run takes on the GPU and torch's allocator does not have: libraries, kernels, communicators."""

    def taken() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    torch.zeros(1, device="cuda")  # the context
    before = taken()
    fit_on_cuda(model, [backend("transformer_engine", "bf16-mixed")], 1)
    return taken() - before


def test_a_run_takes_little_beside_torchs_allocator(fresh_pool, qwen3_dir):
    """Communicators for groups that nobody uses would take 8 GiB: 21 of 388 MiB each."""
    taken = fresh_pool.run(memory_beside_torch, qwen3_dir, world_size=1, init_process_group=False)[0]
    print(f"{taken / 2**30:.2f} GiB")
    assert taken < 3 * 2**30


def fit_grpo_with_vllm(model: Path, world_size: int, precision: str, dtype: str) -> Run:
    """Two rollouts by vLLM on the same GPU."""
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.modules.grpo import GRPOModule
    from lightning_megatron_rl.rollout.engine import SamplingParams
    from lightning_megatron_rl.rollout.vllm import VLLMEngine

    policy = GRPOModule(
        str(model),
        rewards=[parity],
        num_generations=4,
        updates_per_rollout=2,
        sampling=SamplingParams(max_tokens=16),
        engine=VLLMEngine(max_model_len=64, dtype=dtype, kv_cache_memory_gb=1.0, enforce_eager=True),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0, adam_eps=1e-3),
        max_tokens_per_microbatch=256,
    )
    recorder = Recorder()
    trainer = make_trainer({}, world_size, max_steps=2, callbacks=[recorder], precision=precision, **CUDA)
    trainer.fit(policy, SequenceDataModule(prompts(8), 4))
    return Run(recorder.steps, {name: tensor.cpu() for name, tensor in policy.export_weights()})


@pytest.mark.parametrize(
    ("precision", "dtype", "bound"), [("32-true", "float32", 5e-3), ("bf16-mixed", "bfloat16", 0.1)]
)
def test_grpo_with_vllm_on_the_same_gpu(gpu_pool, qwen3_dir, precision, dtype, bound):
    """Trainer and sampler agree before and after an update: weights arrive."""
    run = gpu_pool.run(
        fit_grpo_with_vllm, qwen3_dir, 1, precision, dtype, world_size=1, init_process_group=False, timeout=380
    )[0]
    assert [step["rollout/weight_version"] for step in run.steps] == [0, 1]
    for step in run.steps:
        assert step["mismatch/abs_logp_diff"] < bound
        assert step["policy/grad_norm"] > 0
