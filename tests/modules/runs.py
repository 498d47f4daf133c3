"""GRPO runs on recorded responses, as functions that a gloo worker runs as one rank of a job."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_megatron_rl.rollout.engine import Generation, GenerationRequest, SamplingParams
from lightning_megatron_rl.sample import Prompt, Sample
from tests.tiny_models import SPECIAL_TOKENS, VOCAB_SIZE
from tests.training import Recorder, Run, SequenceDataModule, make_trainer

NUM_GENERATIONS = 4


class ReplayEngine:
    """Answers with responses that were drawn once, whatever the weights: the same rollout for every layout."""

    max_model_len = 64

    def __init__(self) -> None:
        self.weight_version = 0
        self.versions: list[int] = []
        self.names: set[str] = set()

    def start(self, model_path: str | Path) -> None:
        """Nothing to load."""

    def wait_ready(self) -> None:
        """Ready at once."""

    def generate(self, requests: list[GenerationRequest], params: SamplingParams) -> list[list[Generation]]:
        """Draw from the request's seed: ragged lengths, log-probs that are nobody's."""
        answers = []
        for request in requests:
            generator = torch.Generator().manual_seed(request.seed)
            answers.append([self._draw(generator, params.max_tokens) for _ in range(request.num_samples)])
        return answers

    def _draw(self, generator: torch.Generator, max_tokens: int) -> Generation:
        length = int(torch.randint(1, max_tokens + 1, (), generator=generator))
        tokens = torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (length,), generator=generator).tolist()
        logprobs = (-torch.rand(length, generator=generator) * 10).tolist()
        return Generation(tokens, logprobs, "length" if length == max_tokens else "stop")

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take note of what came."""
        self.names = {name for name, _ in weights}
        self.versions.append(version)
        self.weight_version = version

    def close(self) -> None:
        """Nothing to end."""


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
) -> Run:
    """Fit a `GRPOModule` on recorded responses; returns logged values per step and the weights at the end."""
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.modules.grpo import GRPOModule
    from lightning_megatron_rl.modules.grpo_loss import GRPOLossConfig

    engine = ReplayEngine()
    options: dict[str, Any] = {
        "model": str(model),
        "rewards": rewards or [parity, length],
        "reward_weights": None if rewards else [1.0, 0.5],
        "engine": engine,
        "num_generations": NUM_GENERATIONS,
        "updates_per_rollout": 2,
        "sampling": SamplingParams(temperature=0.8, max_tokens=10),
        "loss": GRPOLossConfig(**{"kl_coef": 0.1, "entropy_coef": 0.01, **(loss or {})}),
        "optimizer": OptimizerConfig(lr=1e-3, weight_decay=0.01, adam_eps=1e-3),
        "max_tokens_per_microbatch": 96,
        **(module or {}),
    }
    policy = (make_module or GRPOModule)(**options)
    recorder = Recorder()
    runner = make_trainer(
        strategy, world_size, **{"max_steps": steps, "callbacks": [recorder, *(callbacks or [])], **(trainer or {})}
    )
    runner.fit(policy, SequenceDataModule(prompts(steps * batch_size), batch_size))
    weights = {name: tensor.clone() for name, tensor in policy.export_weights()}
    return Run(recorder.steps, weights, {"versions": engine.versions, "names": engine.names})
