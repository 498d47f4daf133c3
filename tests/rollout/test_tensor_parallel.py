"""Engines of two workers, on a CPU: in processes of their own, and as two ranks of the trainer."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightning_megatron_rl.rollout.protocol import SamplingParams
from lightning_megatron_rl.weights.source import source_of
from tests.modules.runs import fit_grpo
from tests.parallel.test_rendezvous import listening
from tests.rollout.conftest import make_engine, make_requests
from tests.selection import by_default
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.deadline(300)

LOGPROB = 1e-5  # mean difference in fp32: 4e-7 was seen, 2e-3 with weights that are off by a thousandth


def shared_names() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@dataclass
class Sampled:
    """What one rank saw."""

    before: Any
    after: Any
    again: Any  # with the first weights, by an engine that was started after the first was closed
    shared: list[set[str]]  # names in shared memory, while an engine runs and when it is closed


def sample_in_process(model_dir: Path, refused_dir: Path) -> Sampled:
    """Fail to start; sample, change the weights, sample, start another engine and sample with it."""
    from safetensors.torch import load_file

    from lightning_megatron_rl.rollout.vllm.colocated import ColocatedVLLMEngine

    def sample(engine: ColocatedVLLMEngine) -> list[Any]:
        answers = engine.generate(make_requests(3, 2, 20), SamplingParams(max_tokens=8, ignore_eos=True))
        return [(sample.token_ids, sample.logprobs) for group in answers for sample in group]

    def names() -> set[str]:
        torch.distributed.barrier()
        return shared_names()

    found = []
    shared = [names()]
    with pytest.raises((RuntimeError, ValueError), match="Only silu is supported"):  # by vLLM, as it builds it
        ColocatedVLLMEngine(tensor_parallel_size=2, max_model_len=64, kv_cache_memory_gb=0.1).start(refused_dir)
    assert names() == shared[0]
    for _ in range(2):
        engine = ColocatedVLLMEngine(tensor_parallel_size=2, max_model_len=64, kv_cache_memory_gb=0.1)
        engine.start(model_dir)
        shared.append(names())
        found.append(sample(engine))
        if len(found) == 1:
            weights = load_file(model_dir / "model.safetensors")
            engine.update_weights(source_of([(name, tensor * 1.5) for name, tensor in weights.items()]), 1)
            found.append(sample(engine))
        engine.close()
        shared.append(names())
    return Sampled(*found, shared)


@pytest.mark.slow
def test_engine_in_two_trainers_processes_leaves_no_shared_memory(fresh_pool, model_dir, tmp_path):
    """vLLM's workers talk through shared memory, which would stay for as long as the run's processes do.

    What a start leaves that fails would make every later one fail.
    """
    refused = save_tiny_model(tmp_path, "qwen3", hidden_act="gelu")
    ranks = fresh_pool.run(sample_in_process, model_dir, refused, world_size=2, timeout=250)
    first, second = ranks
    assert (first.before, first.after) == (second.before, second.after)
    assert first.before != first.after
    assert first.again == first.before
    for rank in ranks:
        there, running, closed, again, closed_again = rank.shared
        assert len(running) > len(there)
        assert len(again) > len(there)
        assert closed == closed_again == there


def train_in_process(model_dir: Path, size: int) -> list[dict[str, float]]:
    """GRPO whose trainer's ranks are the sampler's workers, too."""
    from lightning_megatron_rl.rollout.vllm.colocated import ColocatedVLLMEngine

    engine = ColocatedVLLMEngine(tensor_parallel_size=size, max_model_len=64, kv_cache_memory_gb=0.1)
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": size // 2, "sequence_parallel": True}
    run = fit_grpo(model_dir, layout, size, steps=3, module={"engine": engine})
    engine.close()
    return run.steps


@pytest.mark.parametrize("size", by_default([2], [2, 4]))
def test_grpo_with_an_engine_in_the_trainers_processes(fresh_pool, model_dir, size):
    """The trainer's layout is another than the sampler's, whose log-probs are the trainer's after every update."""
    there = shared_names()
    for steps in fresh_pool.run(train_in_process, model_dir, size, world_size=size, timeout=280):
        assert [step["rollout/weight_version"] for step in steps] == [0, 1, 2]
        for step in steps:
            assert step["mismatch/abs_logp_diff"] < LOGPROB
            assert step["policy/grad_norm"] > 0
    assert shared_names() == there


@pytest.mark.slow  # while it runs, its semaphores would be laid at the door of tests that run beside it
def test_engine_of_two_processes_leaves_no_shared_memory_and_no_sockets(model_dir):
    """Its workers are killed when it closes, and cannot remove what they talked through."""
    there, temporary = shared_names(), set(Path(tempfile.gettempdir()).iterdir())
    engine = make_engine(tensor_parallel_size=2, max_model_len=64)
    engine.start(model_dir)
    sockets = engine._sockets.path
    try:
        answers = engine.generate(make_requests(3, 2, 20), SamplingParams(max_tokens=8, ignore_eos=True))
        running = shared_names()
        assert any(path.is_socket() for path in sockets.iterdir())
        assert engine.pid is not None
        workers = [child.pid for child in psutil.Process(engine.pid).children(recursive=True)]
        assert any(listening(pid) for pid in workers), "one of them serves the store"
        for pid in [engine.pid, *workers]:
            assert not listening(pid) & {"0.0.0.0", "::"}
    finally:
        engine.close()
    assert set(Path(tempfile.gettempdir()).iterdir()) - temporary == set()
    assert [len(group) for group in answers] == [2, 2, 2]
    assert len(running) > len(there)
    assert shared_names() == there
