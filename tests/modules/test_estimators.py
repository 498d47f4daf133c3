"""Closed forms of pass@k, the majority vote and the intervals."""

import itertools
import math

import pytest
import torch

from lightning_megatron_rl.modules.estimators import majority_vote, mean_interval, pass_at_k, score_interval


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 2, 2, 5 / 6),
        (8, 1, 1, 1 / 8),
        (8, 1, 8, 1.0),
        (8, 0, 4, 0.0),
        (8, 8, 1, 1.0),
        (5, 2, 3, 0.9),
        (5, 3, 3, 1.0),
    ],
)
def test_pass_at_k(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(("n", "k"), [(4, 1), (4, 3), (6, 2)])
def test_pass_at_k_is_unbiased(n, k):
    """Its expectation over all outcomes of n draws is 1 - (1 - p)^k; that of 1 - (1 - c/n)^k is not."""
    p = 0.3
    mean = sum(
        p ** sum(outcome) * (1 - p) ** (n - sum(outcome)) * pass_at_k(n, sum(outcome), k)
        for outcome in itertools.product((0, 1), repeat=n)
    )
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_of_too_few_is_refused(n, c, k):
    with pytest.raises(ValueError, match="1 <= k <= n"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        ("778", (1, 1, 0), 1.0),
        ("788", (1, 0, 0), 0.0),
        ("78", (1, 0), 0.5),  # a tie
        ("7889", (1, 0, 0, 0), 0.0),
        ("7788", (1, 1, 0, 0), 0.5),
        ("789", (1, 0, 0), 1 / 3),
        ("777", (1, 0, 0), 1 / 3),  # one answer, different verdicts
        ([None, None, "7"], (0, 0, 1), 1.0),
        ([None, None], (0, 0), 0.0),
    ],
)
def test_majority_vote(answers, right, expected):
    assert majority_vote(list(answers), [bool(verdict) for verdict in right]) == pytest.approx(expected)


def test_majority_vote_needs_a_verdict_for_each():
    with pytest.raises(ValueError, match="2 answers, 1 verdicts"):
        majority_vote(["a", "b"], [True])


def test_score_interval_is_wilsons_for_zeros_and_ones():
    """Against its defining equation, |p - q| = z sqrt(q (1 - q) / n) at both ends q, and values of the literature."""
    low, high = score_interval(8, 8, 10, 0.95)
    for q in (low, high):
        assert abs(0.8 - q) == pytest.approx(1.959963984540054 * math.sqrt(q * (1 - q) / 10), rel=1e-9)
    assert (low, high) == (pytest.approx(0.4901625, abs=1e-6), pytest.approx(0.9433178, abs=1e-6))
    assert score_interval(0, 0, 10, 0.95) == (0.0, pytest.approx(0.2775328, abs=1e-6))
    assert score_interval(10, 10, 10, 0.95) == (pytest.approx(0.7224672, abs=1e-6), 1.0)


def test_score_interval_knows_that_fractions_vary_less():
    values = [0.25, 0.5, 0.5, 0.75]
    low, high = score_interval(sum(values), sum(x * x for x in values), 4, 0.95)
    n = 4 * 0.25 / 0.03125  # p (1 - p) over the variance
    expected = score_interval(n / 2, n / 2, n, 0.95)
    assert (low, high) == (pytest.approx(expected[0]), pytest.approx(expected[1]))
    assert score_interval(2.0, 1.0, 4, 0.95) == score_interval(2.0, 2.0, 4, 0.95)  # all 0.5: as wide as for 0 and 1
    assert all(math.isnan(end) for end in score_interval(0, 0, 0, 0.95))


def test_score_interval_covers():
    """Of 2000 evaluations of 60 prompts with 4 responses each, 95 % cover the true pass@2; 3.5 sigma are 1.7 %."""
    generator = torch.Generator().manual_seed(0)
    chance = torch.rand(2000, 60, 1, generator=generator).pow(2)
    right = (torch.rand(2000, 60, 4, generator=generator) < chance).sum(-1)
    table = torch.tensor([pass_at_k(4, count, 2) for count in range(5)], dtype=torch.float64)
    values = table[right]
    truth = 1 - sum(math.comb(2, i) * (-1) ** i * (1 / (2 * i + 1)) for i in range(3))  # E (1 - p)^2 with p = u^2
    covered = [
        low <= truth <= high
        for low, high in (
            score_interval(total, squares, 60, 0.95)
            for total, squares in zip(values.sum(1).tolist(), values.square().sum(1).tolist(), strict=True)
        )
    ]
    assert sum(covered) / 2000 == pytest.approx(0.95, abs=0.017)


def test_mean_interval():
    half = 1.959963984540054 / math.sqrt(3)
    assert mean_interval(6.0, 14.0, 3, 0.95) == (pytest.approx(2 - half), pytest.approx(2 + half))
    assert mean_interval(6.0, 12.0, 3, 0.95) == (2.0, 2.0)
    assert all(math.isnan(end) for end in mean_interval(1.0, 1.0, 1, 0.95))
