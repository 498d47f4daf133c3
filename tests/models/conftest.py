"""Sequences and an independent reference for the tests of this folder."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tiny_models import VOCAB_SIZE

TOLERANCE = 1e-4  # what the project promises in fp32; reassociated sums in 4 layers differ by up to about 5e-6


@pytest.fixture(scope="session")
def sequences() -> list[list[int]]:
    """Token ids of sequences of unequal lengths, one of them with a single prediction; no padding token.

    Transformers gives the padding token's embedding no gradient.
    """
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (9, 2, 40, 17, 23, 5)]


def reference(source: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Transformers' model of a directory; its kernels for attention leave soft-capping out without a word."""
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="eager")


def hf_logprobs(
    source: Path | torch.nn.Module,
    sequences: list[list[int]],
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Log-probs of the next tokens and entropy [2, tokens] of each sequence alone, by a directory's or given model."""
    model = source if isinstance(source, torch.nn.Module) else reference(source, dtype)
    model.eval()
    results = []
    for sequence in sequences:
        ids = torch.tensor([sequence])
        with torch.no_grad():
            log_p = (model(ids[:, :-1]).logits.float() / temperature).log_softmax(-1)
        chosen = log_p.gather(-1, ids[:, 1:, None])[..., 0]
        results.append(torch.cat([chosen, -(log_p.exp() * log_p).sum(-1)]))
    return results


def worst_difference(results: list[Tensor], expected: list[Tensor]) -> float:
    """The largest absolute difference between log-probs (or entropies) of the same sequences."""
    assert len(results) == len(expected)
    return max((ours - theirs).abs().max().item() for ours, theirs in zip(results, expected, strict=True))
