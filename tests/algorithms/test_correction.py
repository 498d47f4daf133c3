import math
from functools import partial

import pytest
import torch

from lightning_megatron_rl.algorithms.correction import (
    CORRECTIONS,
    correction,
    geometric_mask,
    icepop_weights,
    truncated_importance_weights,
)
from lightning_megatron_rl.algorithms.sequences import Sequences

NAN = float("nan")


def test_token_level():
    delta = torch.tensor([math.log(1.5), math.log(3.0), math.log(0.25)])
    weights = truncated_importance_weights(delta - 1, torch.full((3,), -1.0))
    assert weights.tolist() == pytest.approx([1.5, 2.0, 0.25], rel=1e-6)  # fp32 logarithms


def test_sequence_level_sums_logs_per_sequence():
    delta = torch.tensor([math.log(1.5), math.log(0.5), math.log(0.5), math.log(8.0)])
    index = torch.tensor([0, 1, 0, 1])
    sequences = Sequences(index, torch.ones(4, dtype=torch.bool), 2)
    weights = truncated_importance_weights(delta, torch.zeros(4), level="sequence", sequences=sequences, cap=3.0)
    assert weights.tolist() == pytest.approx([0.75, 3.0, 0.75, 3.0], rel=1e-6)  # fp32 logarithms


@pytest.mark.parametrize(
    "function",
    [
        partial(truncated_importance_weights, level="sequence"),
        partial(icepop_weights, level="sequence"),
        partial(geometric_mask, low=0.5, high=1.4),
    ],
)
def test_padded_rows_equal_flat_tokens(function):
    generator = torch.Generator().manual_seed(0)
    old, rollout = torch.randn(2, 8, 4, generator=generator)
    mask = torch.rand(8, 4, generator=generator) < 0.6
    mask[2] = False
    index = torch.arange(8)[:, None].expand(8, 4)[mask]
    padded = function(old, rollout, mask)
    sequences = Sequences(index, mask[mask], 8)
    flat = function(old[mask], rollout[mask], mask[mask], sequences=sequences)
    assert torch.equal(padded[mask], flat)
    assert len(flat.unique()) > 1


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
    delta = torch.tensor([[1e4], [-1e4]])
    weights = truncated_importance_weights(delta, torch.zeros(2, 1), level=level, cap=1e30)
    assert weights.flatten().tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-6)  # fp32 exp


def test_no_tokens():
    empty = torch.zeros(0)
    sequences = Sequences(empty.long(), empty.bool(), 0)
    assert truncated_importance_weights(empty, empty, level="sequence", sequences=sequences).shape == (0,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "prompt"}, "unknown level 'prompt'.*choose one of sequence, token"),
        ({"cap": 0.0}, "cap is 0.0: choose a positive number"),
        ({"cap": NAN}, "cap is nan"),
        ({"level": "sequence"}, r"shape \(2,\) do not tell where a sequence ends: pass sequences"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        truncated_importance_weights(torch.zeros(2), torch.zeros(2), **options)


def test_icepop_rejects_what_tis_would_cap():
    delta = torch.tensor([[0.4, 0.5001, 1.5, 4.999, 6.0, 1.0]]).log()
    mask = torch.tensor([[True] * 5 + [False]])
    weights = icepop_weights(delta - 1, torch.full((1, 6), -1.0), mask)
    assert weights[0].tolist() == pytest.approx([0.0, 0.5001, 1.5, 4.999, 0.0, 0.0], rel=1e-5)  # fp32 logarithms


def test_icepop_per_sequence_weights_or_rejects_all_of_it():
    """Products of 1.5 x 0.5, of 3 x 3 and of 0.5 x 0.5, bounds 0.5 and 5; what is masked does not count."""
    delta = torch.tensor([[1.5, 0.5, 1.0], [3.0, 3.0, 0.1], [0.5, 0.5, 9.0]]).log()
    mask = torch.tensor([[True, True, True], [True, True, False], [True, True, False]])
    weights = icepop_weights(delta - 1, torch.full((3, 3), -1.0), mask, level="sequence")
    assert weights.tolist() == [pytest.approx([0.75] * 3, rel=1e-6), [0.0] * 3, [0.0] * 3]  # fp32 logarithms
    with pytest.raises(ValueError, match=r"unknown level 'group'.*choose one of sequence, token"):
        icepop_weights(delta, delta, mask, level="group")


def test_geometric_mask_keeps_or_rejects_whole_sequences():
    delta = torch.tensor([[0.02, -0.01, 9.0], [0.02, 0.02, 0.02], [-0.02, -0.02, -0.02], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True] * 3, [True] * 3, [False] * 3])
    weights = geometric_mask(delta, torch.zeros(4, 3), mask)
    assert weights.tolist() == [[1.0, 1.0, 0.0], [0.0] * 3, [0.0] * 3, [0.0] * 3]


def test_geometric_mask_does_not_reject_the_long():
    """The product of 400 weights of 1.005 is 7.4, their geometric mean 1.005."""
    delta = torch.full((1, 400), 0.005)
    mask = torch.ones(1, 400, dtype=torch.bool)
    assert geometric_mask(delta, torch.zeros(1, 400), mask).min() == 1
    assert truncated_importance_weights(delta, torch.zeros(1, 400), mask, level="sequence").max() == 2  # the cap


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("garbage", [NAN, float("inf"), -1e30])
def test_no_correction_looks_at_masked_positions(name: str, garbage: float):
    mask = torch.tensor([[True, True, False]])
    old = torch.tensor([[0.001, -0.001, garbage]])
    weights = correction(name)(old, torch.zeros(1, 3), mask)
    assert weights[0, 2] == 0
    assert weights[0, :2].tolist() == pytest.approx([1.0, 1.0], abs=2e-3)  # e^0.001
    assert not weights.requires_grad


@pytest.mark.parametrize("function", [icepop_weights, geometric_mask])
@pytest.mark.parametrize("bounds", [(1.5, 2.0), (0.5, 0.9), (-0.1, 2.0), (0.5, NAN)])
def test_bounds_contain_one(function, bounds: tuple[float, float]):
    token = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="must contain 1: choose 0 <= low < 1 < high"):
        function(token, token, token.bool(), low=bounds[0], high=bounds[1])


def test_unknown_correction():
    with pytest.raises(ValueError, match="unknown correction 'ice': choose one of geo_mask, icepop, tis"):
        correction("ice")
