"""vLLM on CUDA: sleep and wake, weights by every way, parity with the trainer, no growth in memory, restarts."""

import json
import math
import subprocess
import sys
from typing import Any

import pytest

from tests.gpu.engines import GPURun, draw_around_engine, fit_grpo
from tests.gpu.machine import needs_gpus, needs_processes

pytestmark = pytest.mark.deadline(600)
ONE = {"world_size": 1, "init_process_group": False, "timeout": 400}
# trainer and sampler in bf16 (8 bits) with kernels of their own, on random weights: at most 0.014 in 51 rounds of each
# family on an H200; weights that are one rollout old differ by 0.09 to 0.15 (measured in fp32 on a CPU)
BF16_LOGPROB = 0.04


def check_parity(run: GPURun, steps: int) -> None:
    """Trainer and sampler agree after 0 and after every later update, each of which moved the policy."""
    assert [step["rollout/weight_version"] for step in run.steps] == list(range(steps))
    for step in run.steps:
        assert step["mismatch/abs_logp_diff"] < BF16_LOGPROB
        assert step["policy/grad_norm"] > 0
        assert math.isfinite(step["policy/loss"])


@pytest.mark.parametrize(("family", "level"), [("tied", 1), ("moe", 2)])
def test_parity_with_the_trainer(gpu_pool, models, family, level):
    run = gpu_pool.run(fit_grpo, models[family], 1, engine={"sleep_level": level}, steps=8, **ONE)[0]
    check_parity(run, 8)


def test_offloading_changes_no_number(gpu_pool, models):
    """The same run, bit by bit, with everything on the GPU: what left came back as it was."""
    parts = ["optimizer", "gradients", "parameters"]
    options: dict[str, Any] = {"engine": {"sleep_level": 1}, "steps": 3}
    stayed = gpu_pool.run(fit_grpo, models["dense"], 1, **options, **ONE)[0]
    moved = gpu_pool.run(fit_grpo, models["dense"], 1, strategy={"offload_while_sampling": parts}, **options, **ONE)[0]
    for mine, theirs in zip(moved.steps, stayed.steps, strict=True):
        for name in ("policy/loss", "policy/grad_norm", "mismatch/abs_logp_diff", "reward/mean"):
            assert mine[name] == theirs[name], name


@pytest.mark.smoke
def test_quick_steps_are_vllms_own(models):
    """By its asynchronous scheduler and graphs, and in the order in which a GPU has its results."""
    command = [sys.executable, "-m", "tests.rollout.quick_steps", str(models["dense"]), "cuda", "[{}]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert found["scheduler"] == "AsyncScheduler"
    assert found["quick"]
    assert found["different_plan"] is None
    assert found["different_responses"] == 0
    assert found["same_cache"]
    assert found["handed_on"] < found["tokens"] / 2  # the others are noted at once


@pytest.mark.smoke
def test_killed_engine_is_replaced_and_gets_its_weights(gpu_pool, models):
    """Nobody kept a copy of the weights: they are pushed again."""
    run = gpu_pool.run(fit_grpo, models["dense"], 1, steps=4, kill_at=2, **ONE)[0]
    check_parity(run, 4)
    assert run.num_restarts == 1
    assert run.shared_files == []  # the process that was killed could not give anything back


def test_sampler_in_the_trainers_process(fresh_pool, models):
    run = fresh_pool.run(fit_grpo, models["dense"], 1, kind="colocated", engine={"sleep_level": 2}, steps=6, **ONE)[0]
    check_parity(run, 6)
    assert {report.transport for report in run.reports} == {"in process"}


def test_sampler_in_process_leaves_random_numbers_alone(fresh_pool, models):
    """vLLM seeds torch's generators when it starts, and others when it samples."""
    before, after = fresh_pool.run(draw_around_engine, models["dense"], **ONE)[0]
    assert after == before


@pytest.mark.parametrize("size", [pytest.param(size, marks=needs_processes(size)) for size in (2, 4)])
def test_sampler_in_several_trainers_processes(fresh_pool, models, size):
    strategy = {
        "tensor_model_parallel_size": 2,  # the model has two groups of keys
        "sequence_parallel": True,
        "pipeline_model_parallel_size": size // 2,
    }
    options: dict[str, Any] = {"engine": {"tensor_parallel_size": size, "sleep_level": 2}, "strategy": strategy}
    world = {**ONE, "world_size": size}
    for run in fresh_pool.run(fit_grpo, models["dense"], size, kind="colocated", steps=4, **options, **world):
        check_parity(run, 4)
        assert run.reports[0].extra_bytes > 0  # in buckets, which show what goes where; then read where it lies
        assert [(report.extra_bytes, report.replayed) for report in run.reports[1:]] == [(0, True)] * 3
        if size == 2:  # one stage: each rank has all that its sampler needs, norms too
            assert {report.peer_bytes for report in run.reports} == {0}
        assert run.shared_files == []


@needs_gpus(2)
def test_sampler_on_two_gpus_beside_two_trainers(gpu_pool, models):
    """Weights of two ranks come in buckets; then two workers read them where they lie, on both GPUs."""
    strategy = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }
    options: dict[str, Any] = {"engine": {"tensor_parallel_size": 2, "sleep_level": 2}, "strategy": strategy}
    run = gpu_pool.run(fit_grpo, models["moe"], 2, steps=4, **options, **{**ONE, "world_size": 2})[0]
    check_parity(run, 4)
    assert run.reports[0].extra_bytes > 0
    assert [(report.extra_bytes, report.replayed) for report in run.reports[1:]] == [(0, True)] * 3
    peers = [report.peer_bytes for report in run.reports]
    assert peers[0] == 0
    assert 0 < peers[1] < run.reports[1].num_bytes  # each expert has a half on the other GPU
    assert peers[1:] == [peers[1]] * 3
    assert run.shared_files == []


@needs_gpus(2)
def test_killed_sampler_of_two_gpus_gets_its_weights(gpu_pool, models):
    """Its successor knows nothing of what lies where: the weights come in buckets once more."""
    options: dict[str, Any] = {"engine": {"tensor_parallel_size": 2}, "strategy": {"tensor_model_parallel_size": 2}}
    both = {**ONE, "world_size": 2}
    run = gpu_pool.run(fit_grpo, models["dense"], 2, steps=5, kill_at=2, **options, **both)[0]
    check_parity(run, 5)
    assert run.num_restarts == 1
    assert [report.extra_bytes > 0 for report in run.reports] == [True, False, True, False, False]
    assert run.shared_files == []
