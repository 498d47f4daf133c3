"""A sampler without a model: what it draws depends on a request's seed alone, so it is the same on every layout."""

from pathlib import Path

import torch

from lightning_megatron_rl.rollout.protocol import (
    Generation,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
    SyncReport,
    check_requests,
)
from lightning_megatron_rl.weights.source import WeightSource
from tests.tiny_models import SPECIAL_TOKENS, VOCAB_SIZE


class SeededEngine(RolloutEngine):
    """Ragged turns of random tokens with random log-probs; notes every request and its answer."""

    def __init__(self, max_model_len: int = 64) -> None:
        self.weight_version = 0
        self.max_model_len = max_model_len
        self.calls: list[list[tuple[GenerationRequest, Generation]]] = []

    def start(self, model_path: str | Path) -> None:
        """Nothing to load."""

    def wait_ready(self) -> None:
        """Ready at once."""

    def generate(self, requests: list[GenerationRequest], params: SamplingParams) -> list[list[Generation]]:
        check_requests(requests, params, vocab_size=VOCAB_SIZE, max_model_len=self.max_model_len)
        assert all(request.num_generations == 1 for request in requests)
        answers = [self._draw(request, params) for request in requests]
        self.calls.append(list(zip(requests, answers, strict=True)))
        return [[answer] for answer in answers]

    def _draw(self, request: GenerationRequest, params: SamplingParams) -> Generation:
        generator = torch.Generator().manual_seed(request.seed)
        limit = request.max_tokens or params.max_tokens
        size = int(torch.randint(1, 6, (), generator=generator))
        tokens = torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (min(size, limit),), generator=generator).tolist()
        logprobs = (-torch.rand(len(tokens), generator=generator) * 10).tolist()
        return Generation(tokens, logprobs, "length" if size > limit else "stop")

    def update_weights(self, source: WeightSource, version: int) -> SyncReport:
        num_bytes = sum(tensor.nbytes for _, tensor in source.tensors())
        self.weight_version = version
        return SyncReport(num_bytes, seconds=0.0, extra_bytes=0, transport="none")

    def close(self) -> None:
        """Nothing to end."""
