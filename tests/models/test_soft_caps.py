"""Soft caps of attention's scores, by hand; that both caps count in the tiny Gemma 2."""

from collections.abc import Callable
from pathlib import Path

import torch

from lightning_megatron_rl.models.layers.packed_attention import Softmax, dense_attention
from tests.models.conftest import TOLERANCE, hf_logprobs, reference, worst_difference


def test_scores_are_capped_before_the_softmax():
    """One query sees two keys with scores 0 and 3; cap 2 makes them 0 and 2 tanh(1.5) = 1.8103."""
    query, value = torch.tensor([0.0, 3.0]), torch.tensor([0.0, 1.0])
    shape = (2, 1, 1, 1)  # tokens, sequences, heads, width
    key = torch.tensor([0.0, 1.0])
    out = dense_attention(query.view(shape), key.view(shape), value.view(shape), Softmax(1.0, cap=2.0))
    expected = torch.tensor([0.0, 1.8103]).softmax(0)[1].item()
    assert abs(out[1].item() - expected) < 1e-4  # the four digits of 1.8103
    assert out[0].item() == 0.0, "the first token sees itself only"


def test_a_high_cap_is_none():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(7, 2, heads, 8, generator=generator) for heads in (4, 2, 2))
    capped = dense_attention(query, key, value, Softmax(0.3, window=3, cap=1e4))
    torch.testing.assert_close(capped, dense_attention(query, key, value, Softmax(0.3, window=3)))


def test_both_caps_count_in_the_tiny_model(checkpoint: Callable[[str], Path], sequences: list[list[int]]):
    """Else a cap that is left out would not show in the comparison with Transformers."""
    directory = checkpoint("gemma2")
    expected = hf_logprobs(directory, sequences)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        model = reference(directory)
        setattr(model.config, name, None)
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = model.config.attn_logit_softcapping
        assert worst_difference(hf_logprobs(model, sequences), expected) > 10 * TOLERANCE, name
