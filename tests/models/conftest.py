"""Checkpoints and independent references for the tests of this room."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tiny_models import VOCAB_SIZE, save_tiny_model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny random checkpoints by family, written once."""
    return cache(lambda family: save_tiny_model(tmp_path_factory.mktemp("models") / family, family))


@pytest.fixture(scope="session")
def sequences() -> list[list[int]]:
    """Token ids of sequences of unequal lengths, one of them with a single prediction."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (9, 2, 40, 17, 23, 5)]


def hf_logprobs(directory: Path, sequences: list[list[int]], temperature: float = 1.0) -> list[Tensor]:
    """Log-probs of the next tokens and entropy [2, tokens] of each sequence alone, by Transformers in fp32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    results = []
    for sequence in sequences:
        ids = torch.tensor([sequence])
        with torch.no_grad():
            log_p = (model(ids[:, :-1]).logits / temperature).log_softmax(-1)
        chosen = log_p.gather(-1, ids[:, 1:, None])[..., 0]
        results.append(torch.cat([chosen, -(log_p.exp() * log_p).sum(-1)]))
    return results
