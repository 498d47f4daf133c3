"""The order in which trainer and sampler hand over memory, with an engine that refuses any other."""

import os
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron_rl.rollout.protocol import (
    Generation,
    GenerationRequest,
    SamplingParams,
    SyncReport,
    WeightsLostError,
)
from lightning_megatron_rl.weights.source import WeightSource
from tests.modules.runs import NUM_GENERATIONS, ReplayEngine, length, prompts
from tests.tiny_models import save_tiny_model
from tests.training import SequenceDataModule, make_trainer


class SleepingEngine(ReplayEngine):
    """Replays like `ReplayEngine`, but only with weights, awake, and in the order that memory allows."""

    def __init__(
        self, sleep_level: int, lose_at: int | None = None, break_at: int | None = None, full_at: str | None = None
    ) -> None:
        super().__init__()
        self.sleep_level = sleep_level
        self.lose_at = lose_at  # the call of `generate` that finds no weights
        self.break_at = break_at  # the call of `update_weights` that does not come to its end
        self.full_at = full_at  # what finds no memory when it wakes
        self.awake = {"weights", "kv_cache"}
        self.has_weights = True
        self.calls: list[str] = []
        self.trainer_parts: list[tuple[str, ...]] = []  # away when the cache wakes
        self.strategy: Any = None
        self.has_let_go = False

    def let_go(self) -> None:
        self.has_let_go = True

    def update_weights(self, source: WeightSource, version: int) -> SyncReport:
        assert "weights" in self.awake
        assert "parameters" not in self.strategy.memory.away
        self.calls.append("update")
        self.has_let_go = False
        if self.calls.count("update") == self.break_at:
            next(source.tensors())
            raise WeightsLostError("gone")
        self.has_weights = True
        return super().update_weights(source, version)

    def generate(self, requests: list[GenerationRequest], params: SamplingParams) -> list[list[Generation]]:
        assert self.awake == {"weights", "kv_cache"}
        self.calls.append("generate")
        if self.calls.count("generate") == self.lose_at:
            self.has_weights = False
        if not self.has_weights:
            raise WeightsLostError("gone")
        return super().generate(requests, params)

    def sleep(self, level: int = 1) -> int:
        assert level == self.sleep_level
        self.calls.append("sleep")
        self.awake = set()
        self.has_weights = self.has_weights and level == 1
        return 7

    def wake(self, tags: list[str] | None = None) -> None:
        assert tags is not None
        new = set(tags) - self.awake
        if self.full_at in new:
            raise RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:163")
        self.calls.extend(f"wake {tag}" for tag in sorted(new))
        self.awake |= new
        if "kv_cache" in new:
            self.trainer_parts.append(self.strategy.memory.away)


def fit(
    model: Path,
    world_size: int,
    level: int,
    lose_at: int | None,
    strategy: dict[str, Any],
    break_at: int | None = None,
    rank: int | None = None,
    full_at: str | None = None,
) -> tuple[list[str], list[int], list[tuple[str, ...]]]:
    """Two rollouts with a validation after each; returns the engine's calls, versions, and what was away.

    Weights are lost by the engine of one rank, or of any.
    """
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.modules.grpo import GRPOModule
    from lightning_megatron_rl.modules.training import TrainingSettings

    fails = rank is None or int(os.environ["RANK"]) == rank
    engine = SleepingEngine(level, lose_at, break_at, full_at) if fails else SleepingEngine(level)
    policy = GRPOModule(
        str(model),
        rewards=[length],
        engine=engine,
        num_generations=NUM_GENERATIONS,
        sampling=SamplingParams(max_tokens=10),
        train=TrainingSettings(optimizer=OptimizerConfig(lr=1e-3), max_tokens_per_microbatch=96),
    )
    parts = {"offload_while_sampling": ["parameters", "optimizer", "gradients"]}
    trainer = make_trainer({**parts, **strategy}, world_size, max_steps=2, val_check_interval=1, limit_val_batches=1)
    engine.strategy = trainer.strategy
    trainer.fit(policy, SequenceDataModule(prompts(8), 4))
    assert engine.strategy.memory.away == ()
    assert engine.has_let_go  # of the trainer's memory, which goes after this
    return engine.calls, engine.versions, engine.trainer_parts


START = ["sleep"]
ROUND = ["wake weights", "update", "wake kv_cache", "generate", "sleep"]
AGAIN = ["wake weights", "wake kv_cache", "generate", "sleep"]  # the weights are still there and still the newest


@pytest.mark.parametrize(("level", "after_validation"), [(1, AGAIN), (2, ROUND)])
def test_order_of_handing_over(worker_pool, qwen3_dir, level, after_validation):
    options = {"world_size": 1, "init_process_group": False}
    calls, versions, parts = worker_pool.run(fit, qwen3_dir, 1, level, None, {}, **options)[0]
    # rollout of step 0, validation with the weights of step 1, rollout of step 1, validation with those of step 2
    assert calls == [*START, *ROUND, *ROUND, *after_validation, *ROUND]
    assert versions == ([0, 1, 2] if level == 1 else [0, 1, 1, 2])
    assert set(parts) == {("optimizer", "gradients", "parameters")}


def test_weights_that_went_are_pushed_again(worker_pool, qwen3_dir):
    """Also on the ranks that do not sample, which take part in the export."""
    tensor_parallel = {"tensor_model_parallel_size": 2}
    options = {"world_size": 2, "init_process_group": False}
    calls, versions, _ = worker_pool.run(fit, qwen3_dir, 2, 1, 1, tensor_parallel, **options)[0]
    lost = ["wake weights", "update", "wake kv_cache", "generate", "update", "generate", "sleep"]
    assert calls == [*START, *lost, *ROUND, *AGAIN, *ROUND]
    assert versions == [0, 0, 1, 2]


@pytest.mark.parametrize(("lose_at", "break_at"), [(1, None), (None, 1)], ids=["while sampling", "in the push"])
def test_replicas_that_share_experts_push_again_together(worker_pool, tmp_path, lose_at, break_at):
    """Each has an engine of its own, but needs the other's experts: alone it would wait for them in vain."""
    model = save_tiny_model(tmp_path, "qwen3_moe")
    experts = {"expert_model_parallel_size": 2, "timeout_s": 60.0}
    options = {"world_size": 2, "init_process_group": False}
    first, second = worker_pool.run(fit, model, 2, 1, lose_at, experts, break_at, 0, **options)
    again = ["wake weights", "update", "wake kv_cache", "generate", "update", "sleep"]
    if lose_at:
        lost = ["wake weights", "update", "wake kv_cache", "generate", "update", "generate", "sleep"]
    else:
        lost = again = ["wake weights", "update", "update", "wake kv_cache", "generate", "sleep"]
    assert first[0] == [*START, *lost, *ROUND, *AGAIN, *ROUND]
    assert second[0] == [*START, *again, *ROUND, *AGAIN, *ROUND]
    assert second[1] == [0, 0, 1, 2]


@pytest.mark.parametrize(("tag", "name"), [("weights", "weights"), ("kv_cache", "key/value cache")])
def test_sampler_that_finds_no_memory_says_what_to_do(worker_pool, qwen3_dir, tag, name):
    """On all ranks: those that do not sample would wait."""
    arguments = (qwen3_dir, 2, 1, None, {"tensor_model_parallel_size": 2}, None, None, tag)
    with pytest.raises(RuntimeError, match=f"the sampler's {name} woke, and found too little memory") as error:
        worker_pool.run(fit, *arguments, world_size=2, init_process_group=False)
    assert "kv_cache_memory_gb" in str(error.value)
    assert "CUDA Error: out of memory" in str(error.value)  # the cause
