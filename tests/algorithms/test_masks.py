"""Masks of the policy loss: by hand, against torch.quantile, and however the tokens lie on ranks."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron_rl.algorithms.masks import off_policy_mask, top_entropy_mask
from lightning_megatron_rl.algorithms.sequences import Sequences
from tests.algorithms.ranks import run_ranks
from tests.properties import PROPERTY, SEEDS

NAN = float("nan")


def test_off_policy_sequences_with_a_negative_advantage_are_left_out():
    """Means of log π_roll - log π_θ of 0.7 (A < 0: out), 0.7 (A > 0), 0.4 and -0.7 (the policy likes it more)."""
    index = torch.tensor([[0, 0, 0], [1, 1, 1], [2, 2, 2], [3, 3, -1]])
    mask = torch.tensor([[True, True, False], [True, True, False], [True, True, True], [True, True, False]])
    drift = torch.tensor([[0.2, 1.2, NAN], [0.2, 1.2, NAN], [0.4, 0.4, 0.4], [-0.7, -0.7, NAN]])
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])[:, None].expand(4, 3)
    logprobs = torch.full((4, 3), -1.0).requires_grad_()
    kept = off_policy_mask(logprobs, drift - 1, advantages, Sequences(index, mask, 4), threshold=0.5)
    assert [row[valid].tolist() for row, valid in zip(kept, mask, strict=True)] == [
        [False, False],
        [True, True],
        [True, True, True],
        [True, True],
    ]


def test_advantages_of_tokens_are_masked_one_by_one():
    index, mask = torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool)
    old = torch.zeros(3)
    kept = off_policy_mask(old - 1, old, torch.tensor([1.0, -1.0, 0.0]), Sequences(index, mask, 1), threshold=0.5)
    assert kept.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("quantile", "kept"),
    [(1.0, 5), (0.0, 1), (0.2, 1), (0.25, 2), (0.5, 3), (0.7, 3), (0.75, 4), (0.9, 4)],  # 5 - ceil((1 - ρ) · 4)
)
def test_number_of_kept_tokens(quantile: float, kept: int):
    entropies = torch.tensor([0.3, NAN, 2.5, 0.0, 1e-4, 7.0])
    mask = ~entropies.isnan()
    found = top_entropy_mask(entropies, mask, quantile=quantile)
    order = [5, 2, 0, 4, 3]  # from the largest
    assert sorted(found.nonzero().flatten().tolist()) == sorted(order[:kept])


def test_rounding_of_the_share_costs_no_token():
    """(1 - 0.7) · 10 is 3.0000000000000004 in float64: 3 of 11 tokens are left out, not 4."""
    assert top_entropy_mask(torch.arange(11.0), torch.ones(11, dtype=torch.bool), quantile=0.7).sum() == 8


def test_equal_entropies_are_kept_together():
    entropies, mask = torch.tensor([1.0, 1.0, 1.0, 0.5]), torch.ones(4, dtype=torch.bool)
    assert top_entropy_mask(entropies, mask, quantile=0.0).tolist() == [True, True, True, False]
    assert top_entropy_mask(torch.full((4,), -1e-8), mask, quantile=0.1).tolist() == [True] * 4  # rounding below 0
    rounded = torch.tensor([4.0, 4.0 - 1e-6, 4.0 + 1e-6, 3.999])
    assert top_entropy_mask(rounded, mask, quantile=0.0).tolist() == [True, True, True, False]


def test_no_tokens_at_all():
    assert top_entropy_mask(torch.ones(3), torch.zeros(3, dtype=torch.bool), quantile=0.5).tolist() == [False] * 3
    assert top_entropy_mask(torch.empty(0), torch.empty(0, dtype=torch.bool), quantile=0.5).shape == (0,)


@PROPERTY
@given(
    seed=SEEDS,
    size=st.integers(1, 400),
    percent=st.integers(0, 100),
    ranks=st.integers(1, 4),
    scale=st.sampled_from([1e-6, 1.0, 1e3]),
)
def test_ranks_together_keep_what_torch_quantile_says(seed: int, size: int, percent: int, ranks: int, scale: float):
    """However the tokens are dealt out to ranks, of which some have none: those above the quantile of all, or equal."""
    generator = torch.Generator().manual_seed(seed)
    entropies = scale * torch.rand(size, generator=generator)
    mask = torch.rand(size, generator=generator) < 0.8
    owner = torch.randint(0, ranks, (size,), generator=generator)
    expected = torch.zeros(size, dtype=torch.bool)
    if mask.any():
        # float64: in fp32 (1 - ρ) (n - 1) that is a whole number becomes a fraction now and then
        threshold = torch.quantile(entropies[mask].double(), 1 - percent / 100, interpolation="higher")
        nearest = round((100 - percent) * (int(mask.sum()) - 1) / 100, 9)
        if nearest == int(nearest):  # of a whole number float64 may make the next
            threshold = entropies[mask].sort().values[int(nearest)]
        expected = mask & (entropies.double() >= threshold.double() * (1 - 1e-5))

    def rank(number: int, all_reduce) -> torch.Tensor:
        mine = owner == number
        return top_entropy_mask(entropies[mine], mask[mine], quantile=percent / 100, all_reduce=all_reduce)

    found = run_ranks([functools.partial(rank, number) for number in range(ranks)])
    for number, kept in enumerate(found):
        assert torch.equal(kept, expected[owner == number])
