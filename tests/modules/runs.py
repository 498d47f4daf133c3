"""GRPO runs on recorded responses, as functions that a gloo worker runs as one rank of a job."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from lightning_megatron_rl.rollout import replay
from lightning_megatron_rl.rollout.protocol import SamplingParams, SyncReport
from lightning_megatron_rl.sample import Prompt, Sample
from lightning_megatron_rl.weights.source import WeightSource, source_of
from tests.module_options import nested
from tests.tiny_models import SPECIAL_TOKENS, VOCAB_SIZE
from tests.training import Recorder, Run, SequenceDataModule, make_trainer

NUM_GENERATIONS = 4
MAX_RESPONSE = 10  # tokens


class ReplayEngine(replay.ReplayEngine):
    """Answers `prompts` with responses that were drawn once, and takes note of the weights that come."""

    def __init__(self) -> None:
        super().__init__(recorded_samples())
        self.max_model_len = 64
        self.versions: list[int] = []
        self.names: set[str] = set()

    def update_weights(self, source: WeightSource, version: int) -> SyncReport:
        """Take note of what came."""
        self.names = {name for name, _ in source.tensors()}
        self.versions.append(version)
        self.num_restarts = 10 + version  # as if its process had been lost before
        return super().update_weights(source_of(()), version)


def recorded_samples(count: int = 16) -> list[Sample]:
    """Responses to the first prompts: ragged lengths, log-probs that are nobody's."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for prompt in prompts(count):
        for _ in range(NUM_GENERATIONS):
            size = int(torch.randint(1, MAX_RESPONSE + 1, (), generator=generator))
            tokens = torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (size,), generator=generator).tolist()
            logprobs = (-torch.rand(size, generator=generator) * 10).tolist()
            samples.append(Sample(prompt, tokens, logprobs, finish_reason="length" if size == MAX_RESPONSE else "stop"))
    return samples


def parity(samples: list[Sample]) -> list[float]:
    """Reward a response by its tokens: any function of them does."""
    return [(sum(sample.response_ids) % 7) / 6 for sample in samples]


def length(samples: list[Sample]) -> list[float]:
    """Reward short responses."""
    return [1.0 / len(sample.response_ids) for sample in samples]


def fails_on_long(samples: list[Sample]) -> list[float]:
    """Raise for some sample."""
    return [1.0 / (len(sample.response_ids) - 3) for sample in samples]


def prompts(count: int, dataset: str = "train") -> list[Prompt]:
    """Ragged prompts of printable characters."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(count):
        size = int(torch.randint(2, 12, (), generator=generator))
        ids = torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (size,), generator=generator).tolist()
        rows.append(Prompt(token_ids=ids, text=f"prompt {index}", answer="7", index=index, dataset=dataset))
    return rows


def fit_grpo(
    model: Path,
    strategy: dict[str, Any],
    world_size: int,
    *,
    steps: int = 2,
    batch_size: int = 4,
    module: dict[str, Any] | None = None,
    loss: dict[str, Any] | None = None,
    rewards: list[Callable[..., list[float]]] | None = None,
    callbacks: list[Callback] | None = None,
    trainer: dict[str, Any] | None = None,
    make_module: Callable[..., Any] | None = None,
    data: Any = None,
    ckpt_path: Path | None = None,
) -> Run:
    """Fit a `GRPOModule` on recorded responses; returns logged values per step and the weights at the end."""
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.modules.grpo import GRPOModule
    from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig

    engine = ReplayEngine()
    options: dict[str, Any] = {
        "model": str(model),
        "rewards": rewards or [parity, length],
        "reward_weights": None if rewards else [1.0, 0.5],
        "engine": engine,
        "num_generations": NUM_GENERATIONS,
        "updates_per_rollout": 2,
        "sampling": SamplingParams(temperature=0.8, max_tokens=MAX_RESPONSE),
        "loss": GRPOLossConfig(**{"kl_coef": 0.1, "entropy_coef": 0.01, **(loss or {})}),
        "optimizer": OptimizerConfig(lr=1e-3, weight_decay=0.01, adam_eps=1e-3),
        "max_tokens_per_microbatch": 96,
        **(module or {}),
    }
    policy = (make_module or GRPOModule)(**nested(options))
    recorder = Recorder()
    runner = make_trainer(
        strategy, world_size, **{"max_steps": steps, "callbacks": [recorder, *(callbacks or [])], **(trainer or {})}
    )
    runner.fit(policy, data or SequenceDataModule(prompts(steps * batch_size), batch_size), ckpt_path=ckpt_path)
    weights = {name: tensor.clone() for name, tensor in policy.export_weights()}
    return Run(recorder.steps, weights, {"versions": engine.versions, "names": engine.names})
