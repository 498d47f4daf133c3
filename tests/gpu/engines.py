"""Runs with vLLM on CUDA, as functions that a GPU worker runs as one rank of a job."""

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch

from lightning_megatron_rl.rollout.protocol import (
    Generation,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
    SyncReport,
    derive_seed,
)
from lightning_megatron_rl.weights.source import WeightViews, source_of
from tests.module_options import nested
from tests.modules.runs import parity, prompts
from tests.training import Recorder, SequenceDataModule, make_trainer

MIB = 2**20


def make_engine(kind: str, **options: Any) -> RolloutEngine:
    """An engine that starts quickly: no compilation, a small cache."""
    from lightning_megatron_rl.rollout.vllm.colocated import ColocatedVLLMEngine
    from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine

    settings = {"max_model_len": 64, "dtype": "bfloat16", "kv_cache_memory_gb": 1.0, "enforce_eager": True, **options}
    return {"child": VLLMEngine, "colocated": ColocatedVLLMEngine}[kind](**settings)


def requests(count: int = 8, samples: int = 4) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(6, 101, (count, 24), generator=generator).tolist()
    return [GenerationRequest(row, derive_seed(0, 0, index), samples) for index, row in enumerate(ids)]


PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


def random_weights(model: Path, seed: int) -> list[tuple[str, torch.Tensor]]:
    """Weights of the model's names and shapes, in bf16, on the GPU; norms near one."""
    from safetensors.torch import load_file

    generator = torch.Generator(device="cuda").manual_seed(seed)
    weights = []
    for name, tensor in load_file(model / "model.safetensors").items():
        noise = torch.randn(tensor.shape, generator=generator, device="cuda") * 0.1
        weights.append((name, (noise if tensor.dim() > 1 else 1 + noise).bfloat16()))
    return weights


def sample_logprobs(engine: RolloutEngine) -> list[tuple[list[int], list[float]]]:
    answers: list[list[Generation]] = engine.generate(requests(), PARAMS)
    return [(sample.token_ids, sample.logprobs) for group in answers for sample in group]


@dataclass
class Transports:
    """What an engine sampled after the same weights came by different ways."""

    samples: dict[str, Any] = field(default_factory=dict)
    reports: dict[str, SyncReport] = field(default_factory=dict)
    freed_bytes: dict[int, int] = field(default_factory=dict)
    # that torch has made for this process and not removed: after an update, and when the engine is closed
    shared_files: list[list[str]] = field(default_factory=list)


def torch_files() -> list[str]:
    """Names of what torch has in shared memory for this process."""
    return [path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")]


def send_every_way(model: Path, kind: str, options: dict[str, Any]) -> Transports:
    """The same weights through the host, recorded, replayed, in small buckets, lent for good, and after both sleeps."""
    found = Transports()
    torch.cuda.set_device(0)
    engine = make_engine(kind, sleep_level=2, bucket_mb=1, **options)
    engine.start(model)
    try:
        first, second = random_weights(model, 1), random_weights(model, 2)
        on_host = [(name, tensor.cpu()) for name, tensor in second]

        def push(way: str, weights: Any, version: int) -> None:
            found.reports[way] = engine.update_weights(source_of(weights), version)
            assert engine.weight_version == version
            found.samples[way] = sample_logprobs(engine)

        push("other", first, 1)
        if kind == "child":
            push("host", on_host, 2)
        push("replayed", second, 3)
        push("other again", first, 4)
        push("buckets", iter(second), 5)
        push("buckets of others", iter(first), 6)
        push("buckets replayed", iter(second), 7)
        lent = WeightViews(WeightViews.of([(name, tensor.clone()) for name, tensor in first]).views, stays=True)
        push("lent others", lent, 8)
        for (_, tensor), (_, new) in zip(lent, second, strict=True):
            tensor.copy_(new)
        push("lent", lent, 9)
        found.freed_bytes[1] = engine.sleep(1)
        assert engine.sleep(1) == 0  # asleep already
        engine.wake()
        found.samples["slept at 1"] = sample_logprobs(engine)
        found.freed_bytes[2] = engine.sleep(2)
        engine.wake(["weights"])
        push("slept at 2", second, 10)
        engine.let_go()
        found.shared_files.append(torch_files())
        push("lent at the end", lent, 11)
        found.samples["other"] = found.samples["other again"]
    finally:
        engine.close()
    found.shared_files.append(torch_files())
    return found


class Watcher(pl.Callback):
    """Keeps what a run's phases moved, and the GPU's memory in use while the trainer trains."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.used: list[int] = []
        self.resident: list[int] = []
        self.reports: list[SyncReport] = []
        self.freed: list[int] = []
        self.offloaded: list[int] = []
        self.kill_at = kill_at
        self.seconds: list[float] = []
        self._started = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self._started = time.perf_counter()
        if self.kill_at != trainer.global_step:
            return
        if (pid := pl_module.engine.pid) is not None:  # else another rank has the sampler's process
            os.kill(pid, signal.SIGKILL)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        self.used.append(total - free)
        self.resident.append(psutil.Process().memory_info().rss)
        self.reports.append(pl_module.sampler.last_sync)
        self.freed.append(pl_module.sampler.memory.freed_bytes)
        self.offloaded.append(pl_module.sampler.memory.offloaded_bytes)
        self.seconds.append(time.perf_counter() - self._started)


@dataclass
class GPURun:
    """What one rank saw."""

    steps: list[dict[str, float]]
    used: list[int]  # bytes in use on the GPU after each step
    resident: list[int]  # of the host's memory, by the trainer
    reports: list[SyncReport]
    freed: list[int]
    offloaded: list[int]
    seconds: list[float]
    num_restarts: int
    shared_files: list[str]  # that torch has left for this process when the engine is closed


def make_policy(model: Path, engine: Any, **module: Any) -> Any:
    """GRPO with two updates per rollout of 16 tokens; `module` has settings by their own names."""
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.modules.grpo import GRPOModule

    return GRPOModule(
        str(model),
        rewards=[parity],
        num_generations=4,
        updates_per_rollout=2,
        sampling=SamplingParams(max_tokens=16),
        engine=engine,
        **nested(
            {
                "optimizer": OptimizerConfig(lr=1e-3, weight_decay=0.0, adam_eps=1e-3),
                "max_tokens_per_microbatch": 256,
                **module,
            }
        ),
    )


def fit_grpo(
    model: Path,
    world_size: int,
    *,
    kind: str = "child",
    engine: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    steps: int = 3,
    precision: str = "bf16-mixed",
    module: dict[str, Any] | None = None,
    kill_at: int | None = None,
) -> GPURun:
    """GRPO with two updates per rollout and vLLM as the sampler."""
    sampler = make_engine(kind, **(engine or {}))
    policy = make_policy(model, sampler, **(module or {}))
    recorder, watcher = Recorder(), Watcher(kill_at)
    trainer = make_trainer(
        {"timeout_s": 120.0, **(strategy or {})},
        world_size,
        max_steps=steps,
        callbacks=[recorder, watcher],
        precision=precision,
        accelerator="cuda",
    )
    trainer.fit(policy, SequenceDataModule(prompts(4 * steps), 4))
    restarts = getattr(sampler, "num_restarts", 0)
    policy.close_engine()
    return GPURun(
        recorder.steps,
        watcher.used,
        watcher.resident,
        watcher.reports,
        watcher.freed,
        watcher.offloaded,
        watcher.seconds,
        restarts,
        torch_files(),
    )


def draw_around_engine(model: Path) -> tuple[list[float], list[float]]:
    """What torch draws on both devices without and with a sampler that starts, samples and sleeps in this process."""

    def draw() -> list[float]:
        return [*torch.rand(4).tolist(), *torch.rand(4, device="cuda").tolist()]

    torch.cuda.set_device(0)
    torch.manual_seed(3)
    expected = draw()
    torch.manual_seed(3)
    engine = make_engine("colocated", sleep_level=1)
    engine.start(model)
    engine.generate(requests(2, 2), PARAMS)
    engine.sleep(1)
    engine.wake()
    engine.close()
    return expected, draw()
