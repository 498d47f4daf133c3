import math

import pytest
import torch

from lightning_megatron_rl.algorithms.correction import truncated_importance_weights

NAN = float("nan")


def test_token_level():
    delta = torch.tensor([math.log(1.5), math.log(3.0), math.log(0.25)])
    weights = truncated_importance_weights(delta - 1, torch.full((3,), -1.0))
    assert weights.tolist() == pytest.approx([1.5, 2.0, 0.25], rel=1e-6)  # fp32 logarithms


def test_sequence_level_sums_logs_per_sequence():
    delta = torch.tensor([math.log(1.5), math.log(0.5), math.log(0.5), math.log(8.0)])
    index = torch.tensor([0, 1, 0, 1])
    weights = truncated_importance_weights(delta, torch.zeros(4), level="sequence", sequence_index=index, cap=3.0)
    assert weights.tolist() == pytest.approx([0.75, 3.0, 0.75, 3.0], rel=1e-6)  # fp32 logarithms


def test_padded_rows_equal_flat_tokens():
    generator = torch.Generator().manual_seed(0)
    old, rollout = torch.randn(2, 3, 4, generator=generator)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    index = torch.arange(3)[:, None].expand(3, 4)
    padded = truncated_importance_weights(old, rollout, mask, level="sequence")
    flat = truncated_importance_weights(old[mask], rollout[mask], level="sequence", sequence_index=index[mask])
    assert torch.equal(padded[mask], flat)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("garbage", [NAN, float("inf"), -1e30])
def test_masked_positions_have_no_influence(level: str, garbage: float):
    mask = torch.tensor([[True, True, False]])
    old = torch.tensor([[math.log(1.5), math.log(0.5), garbage]])
    weights = truncated_importance_weights(old, torch.zeros(1, 3), mask, level=level)
    expected = [1.5, 0.5, 0.0] if level == "token" else [0.75, 0.75, 0.0]
    assert weights[0].tolist() == pytest.approx(expected, rel=1e-6)  # fp32 logarithms


def test_weights_carry_no_gradient():
    old = torch.zeros(2, requires_grad=True)
    assert not truncated_importance_weights(old, torch.zeros(2)).requires_grad


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_exponent_is_clamped(level: str):
    index = torch.tensor([0, 1])
    weights = truncated_importance_weights(
        torch.tensor([1e4, -1e4]), torch.zeros(2), level=level, cap=1e30, sequence_index=index
    )
    assert weights.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-6)  # fp32 exp


def test_no_tokens():
    empty = torch.zeros(0)
    index = torch.zeros(0, dtype=torch.long)
    assert truncated_importance_weights(empty, empty, level="sequence", sequence_index=index).shape == (0,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "prompt"}, "unknown level 'prompt'.*choose one of sequence, token"),
        ({"cap": 0.0}, "cap is 0.0: choose a positive number"),
        ({"cap": NAN}, "cap is nan"),
        ({"level": "sequence"}, r"shape \(2,\) do not tell where a sequence ends: pass sequence_index"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        truncated_importance_weights(torch.zeros(2), torch.zeros(2), **options)
