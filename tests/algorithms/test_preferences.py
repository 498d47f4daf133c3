"""Losses of pairs: closed forms, and derivatives against differences of the plain formulas."""

import math
from functools import partial

import pytest
import torch

from lightning_megatron_rl.algorithms.preferences import (
    DPO_LOSSES,
    bradley_terry,
    dpo_sigmoid,
    ipo,
    robust,
    side_gradients,
)

LOSSES = [
    partial(bradley_terry, center_coef=0.1),
    *(
        partial(kind.function, beta=0.3, **({"label_smoothing": 0.2} if kind.smooths else {}))
        for name, kind in DPO_LOSSES.items()
    ),
    partial(DPO_LOSSES["discopop"].function, beta=0.3, tau=0.7),
]
VALUES = [(0.0, 0.0), (1.0, -2.0), (-3.5, 0.25), (20.0, -20.0), (-20.0, 20.0), (0.1, 0.1)]


def test_closed_forms():
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    assert bradley_terry(one, zero).item() == pytest.approx(math.log(1 + math.exp(-1)))
    assert bradley_terry(one, 2 * one, center_coef=0.5).item() == pytest.approx(math.log(1 + math.e) + 0.5 * 9)
    assert dpo_sigmoid(one, one, beta=7.0).item() == pytest.approx(math.log(2))
    assert dpo_sigmoid(one, zero, beta=2.0).item() == pytest.approx(math.log(1 + math.exp(-2)))
    smoothed = 0.75 * math.log(1 + math.exp(-2)) + 0.25 * math.log(1 + math.exp(2))
    assert dpo_sigmoid(one, zero, beta=2.0, label_smoothing=0.25).item() == pytest.approx(smoothed)
    assert ipo(one, one, beta=0.5).item() == pytest.approx(1.0)
    assert ipo(one, zero, beta=0.5).item() == 0.0  # the margin that IPO asks for: 1 / (2 beta)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def kl_of_two(p: float, q: float) -> float:
    """KL divergence of coins that fall on heads with probabilities p and q."""
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


# with c = 0.8, r = -0.5 and beta = 2: b c = 1.6, b r = -1, margin 2.6
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("sigmoid", {}, -log_sigmoid(2.6)),
        ("sigmoid_norm", {"label_smoothing": 0.1}, -0.9 * log_sigmoid(2.6) - 0.1 * log_sigmoid(-2.6)),
        ("hinge", {}, 0.0),
        ("hinge", {"beta": 0.5}, 1 - 0.65),
        ("ipo", {}, (1.3 - 0.25) ** 2),
        ("exo_pair", {"label_smoothing": 0.1}, kl_of_two(sigmoid(2.6), 0.9)),
        ("nca_pair", {}, -log_sigmoid(1.6) - 0.5 * log_sigmoid(-1.6) - 0.5 * log_sigmoid(1.0)),
        ("robust", {"label_smoothing": 0.1}, (-0.9 * log_sigmoid(2.6) + 0.1 * log_sigmoid(-2.6)) / 0.8),
        ("bco_pair", {}, -log_sigmoid(1.6) - log_sigmoid(1.0)),
        ("sppo_hard", {}, (0.8 - 0.25) ** 2 + (-0.5 + 0.25) ** 2),
        ("apo_zero", {}, 1 - sigmoid(1.6) + sigmoid(-1.0)),
        ("apo_down", {}, sigmoid(1.6) + 1 - sigmoid(2.6)),
        (
            "discopop",
            {"tau": 0.5},
            -(1 - sigmoid(5.2)) * log_sigmoid(2.6) + sigmoid(5.2) * math.exp(-2.6),
        ),
    ],
)
def test_closed_forms_of_dpo(name, options, expected):
    chosen, rejected = (torch.tensor([value], dtype=torch.float64) for value in (0.8, -0.5))
    found = DPO_LOSSES[name].function(chosen, rejected, **{"beta": 2.0, **options}).item()
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)  # float64 rounding


def test_robust_loss_is_unbiased_under_flipped_preferences():
    """Of 10 pairs 2 are the wrong way round: the mean is the loss of what was meant."""
    c, r = torch.tensor([1.5], dtype=torch.float64), torch.tensor([0.2], dtype=torch.float64)
    told = 0.8 * robust(c, r, 0.7, label_smoothing=0.2) + 0.2 * robust(r, c, 0.7, label_smoothing=0.2)
    torch.testing.assert_close(told, dpo_sigmoid(c, r, 0.7), rtol=1e-12, atol=0)  # float64 rounding


def test_equal_scores_pull_the_sides_apart_with_half_the_force():
    losses, chosen, rejected = side_gradients(bradley_terry, torch.zeros(2), torch.zeros(2))
    assert losses.tolist() == pytest.approx([math.log(2)] * 2)
    assert chosen.tolist() == [-0.5] * 2
    assert rejected.tolist() == [0.5] * 2


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("pair", VALUES)
def test_derivatives_are_those_of_the_formula(loss, pair):
    c, r = (torch.tensor([value], dtype=torch.float64) for value in pair)
    _, of_chosen, of_rejected = side_gradients(loss, c, r)
    step = 1e-5  # central differences: error step^2 * third derivative + 1e-16 * loss / step, both below 1e-6 of it
    scale = max(1.0, loss(c, r).item())
    by_chosen = (loss(c + step, r) - loss(c - step, r)) / (2 * step)
    by_rejected = (loss(c, r + step) - loss(c, r - step)) / (2 * step)
    assert of_chosen.item() == pytest.approx(by_chosen.item(), abs=1e-6 * scale)
    assert of_rejected.item() == pytest.approx(by_rejected.item(), abs=1e-6 * scale)


@pytest.mark.parametrize("loss", LOSSES)
def test_far_apart_sides_stay_finite(loss):
    for c, r in ((1e4, -1e4), (-1e4, 1e4)):
        found = side_gradients(loss, torch.tensor([c]), torch.tensor([r]))
        assert all(tensor.isfinite().all() for tensor in found)


def test_no_pairs():
    assert [tensor.numel() for tensor in side_gradients(bradley_terry, torch.empty(0), torch.empty(0))] == [0, 0, 0]
