"""Real vLLM engines: two for this whole folder, as each start costs 10 to 30 seconds, and one for tests of streams."""

import json
import os
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightning_megatron_rl.rollout import Generation, GenerationRequest, SamplingParams, VLLMEngine, derive_seed
from lightning_megatron_rl.rollout.protocol import StreamMode
from lightning_megatron_rl.weights.source import source_of
from tests.distributed import WorkerPool
from tests.policing import keep_process, leaked_memory, shared_memory
from tests.tiny_models import save_tiny_model

MAX_MODEL_LEN = 512
IM_END = 5  # token of "<|im_end|>", which is special
# What a model's own defaults would do to the samples if they leaked into them.
GENERATION_CONFIG = {"temperature": 0.3, "top_k": 3, "repetition_penalty": 1.5, "do_sample": True, "eos_token_id": 1}


def make_engine(**changes: Any) -> VLLMEngine:
    settings: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "kv_cache_memory_gb": 0.25, "num_threads": 1}
    return VLLMEngine(**(settings | changes))


def make_requests(num_requests: int, num_generations: int = 1, prompt_length: int = 150) -> list[GenerationRequest]:
    """Prompts that differ from each other and are longer than vLLM's cache block of 128 tokens on CPU."""
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(6, 101, (num_requests, prompt_length), generator=generator).tolist()
    return [GenerationRequest(p, derive_seed(0, 0, i), num_generations) for i, p in enumerate(prompts)]


def random_weights(model: PreTrainedModel, seed: int) -> list[tuple[str, torch.Tensor]]:
    """Give `model` other weights and return them by name, a tied output embedding included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(noise if parameter.ndim > 1 else 1 + noise)
    return [(name, tensor.clone()) for name, tensor in model.state_dict().items()]


def hf_logprobs(
    model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of `response` under log-softmax(logits / temperature), in fp32. # [response tokens, vocabulary]"""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, dim=-1)


def max_logprob_error(
    model: PreTrainedModel,
    requests: list[GenerationRequest],
    results: list[list[Generation]],
    temperature: float = 1.0,
) -> float:
    """Largest difference between the engine's and Hugging Face's log-prob of a sampled token."""
    error = 0.0
    for request, generations in zip(requests, results, strict=True):
        for generation in generations:
            expected = hf_logprobs(model, request.token_ids, generation.token_ids, temperature)
            expected = expected.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
            error = max(error, (torch.tensor(generation.logprobs) - expected).abs().max().item())
    return error


def is_running(pid: int) -> bool:
    """Whether the process runs: one that ended and that nobody has collected yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def session_members(session_id: int) -> list[int]:
    """Running processes of the session that the engine's process leads."""
    members = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == session_id and is_running(pid):
                members.append(pid)
        except ProcessLookupError:
            continue
    return members


def process_state() -> dict[str, Any]:
    """Everything about this process that vLLM changes where it runs in-process."""
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),
        "random": random.getstate(),
        "environ": dict(os.environ),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "pin_memory": torch.Tensor.pin_memory,
        "modules": sorted(name for name in sys.modules if name.split(".")[0] == "vllm"),
    }


@dataclass
class Harness:
    """An engine and the Hugging Face model with the weights that it should have."""

    engine: VLLMEngine
    model: PreTrainedModel
    version: int = 0
    restarts_after_its_starter: int = 0  # once the thread that started it had ended

    def push_random_weights(self, seed: int) -> None:
        """Give the engine and the reference the same new weights."""
        self.version += 1
        self.engine.update_weights(source_of(random_weights(self.model, seed)), self.version)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 whose directory asks for a sampling of its own."""
    directory = save_tiny_model(tmp_path_factory.mktemp("rollout_qwen3"), "qwen3")
    (directory / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    return directory


@pytest.fixture(scope="session")
def tied_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 whose output embedding is its input embedding."""
    return save_tiny_model(tmp_path_factory.mktemp("rollout_qwen2_tied"), "qwen2_tied")


@pytest.fixture(scope="session")
def states_around_start() -> dict[str, dict[str, Any]]:
    """State of this process "before" the first engine started and "after" it had sampled."""
    return {}


@pytest.fixture(scope="session")
def harness(model_dir: Path, states_around_start: dict[str, dict[str, Any]]) -> Iterator[Harness]:
    """A running engine for everything that does not break it."""
    before = shared_memory()
    states_around_start["before"] = process_state()
    engine = make_engine()
    engine.start(model_dir)
    engine.generate(make_requests(1), SamplingParams(max_tokens=2))
    states_around_start["after"] = process_state()
    pid = engine.pid
    assert pid is not None
    yield Harness(engine, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval())
    last_pid = engine.pid or pid
    engine.close()
    assert not is_running(last_pid)
    assert session_members(last_pid) == []
    assert leaked_memory(before) == []


@pytest.fixture(scope="session")
def fault_harness(tied_model_dir: Path) -> Iterator[Harness]:
    """A running engine with a tied model, to be killed at will; it was started by a thread that has ended."""
    engine = make_engine(max_restarts=100, sleep_level=1)

    def start() -> None:
        engine.start(tied_model_dir)
        engine.wait_ready()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    engine.generate(make_requests(1), SamplingParams(max_tokens=2))
    model = AutoModelForCausalLM.from_pretrained(tied_model_dir, dtype=torch.float32).eval()
    yield Harness(engine, model, restarts_after_its_starter=engine.num_restarts)
    engine.close()


@pytest.fixture
def fresh_pool() -> Iterator[WorkerPool]:
    """Up to four processes of the test's own: vLLM inside them leaves its patches there."""
    pool = WorkerPool(4, on_start=keep_process)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def streaming(model_dir) -> Iterator[Harness]:
    """Recomputes the cache at an update, and samples while nobody asks."""
    engine = make_engine(max_restarts=100)
    engine.stream_mode = StreamMode(background=True)
    engine.start(model_dir)
    yield Harness(engine, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval())
    engine.close()
