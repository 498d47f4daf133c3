import functools
import math

import pytest
import torch

from lightning_megatron_rl.algorithms.advantages import (
    GROUP_RELATIVE,
    group_advantages,
    zero_spread,
    zero_spread_fraction,
)
from tests.algorithms.ranks import run_ranks

FOUR = torch.tensor([[1.0, 2.0, 3.0, 4.0]])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # unbiased std of 1, 2, 3, 4 is sqrt(5/3)
        ("grpo", [x / (math.sqrt(5 / 3) + 1e-6) for x in (-1.5, -0.5, 0.5, 1.5)]),
        ("dr_grpo", [-1.5, -0.5, 0.5, 1.5]),
        ("rloo", [1 - 3.0, 2 - 8 / 3, 3 - 7 / 3, 4 - 2.0]),  # each minus the mean of the others
        # one group is the whole batch
        ("reinforce_pp", [x / (math.sqrt(5 / 3) + 1e-6) for x in (-1.5, -0.5, 0.5, 1.5)]),
        ("reinforce_pp_baseline", [x / (math.sqrt(5 / 3) + 1e-6) for x in (-1.5, -0.5, 0.5, 1.5)]),
    ],
)
def test_closed_forms(estimator: str, expected: list[float]):
    advantages = group_advantages(FOUR.double(), estimator)
    torch.testing.assert_close(advantages, torch.tensor([expected]).double(), rtol=0, atol=1e-7)  # literals are fp32


def test_documented_numbers():
    # three digits as documented
    assert group_advantages(FOUR, "grpo")[0].tolist() == pytest.approx([-1.162, -0.387, 0.387, 1.162], abs=5e-4)
    one_in_eight = group_advantages(torch.tensor([[0.0] * 5 + [1.0] + [0.0] * 2]), "grpo")
    assert one_in_eight[0, 5].item() == pytest.approx(2.475, abs=5e-4)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_rows_do_not_know_each_other(estimator: str):
    rewards = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([group_advantages(row[None], estimator) for row in rewards])
    assert torch.equal(group_advantages(rewards, estimator), rows)


@pytest.mark.parametrize("estimator", GROUP_RELATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_spread_groups_are_exactly_zero(estimator: str, dtype: torch.dtype):
    rewards = torch.full((1, 3), 0.1, dtype=dtype)  # the float64 mean of three 0.1 is 0.10000000000000002
    assert rewards.double().mean() != 0.1
    advantages = group_advantages(torch.cat([rewards, torch.tensor([[0.0, 1.0, 0.5]], dtype=dtype)]), estimator)
    assert advantages.dtype == dtype
    assert advantages[0].tolist() == [0.0, 0.0, 0.0]
    assert advantages[1].abs().max() > 0.1


def test_large_common_offset():
    rewards = torch.tensor([[0.0, 2.0, 4.0, 6.0]]) + 2.0**24  # exact in fp32, but their fp32 sum is not
    assert group_advantages(rewards, "dr_grpo").tolist() == [[-3.0, -1.0, 1.0, 3.0]]


def test_zero_spread():
    rewards = torch.tensor([[0.1, 0.1, 0.1], [0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 1e-30]])
    assert zero_spread(rewards).tolist() == [True, False, True, False]
    assert zero_spread_fraction(rewards) == 0.5


@pytest.mark.parametrize("estimator", GROUP_RELATIVE)
def test_one_response_per_prompt_is_refused(estimator: str):
    with pytest.raises(ValueError, match="num_generations is 1: set num_generations to at least 2"):
        group_advantages(torch.ones(3, 1), estimator)


def test_flat_rewards_are_refused():
    with pytest.raises(ValueError, match=r"\[prompts, generations\], got the shape \(8,\)"):
        group_advantages(torch.ones(8), "grpo")


def test_unknown_estimator():
    message = (
        "unknown advantage estimator 'gpro': choose one of dr_grpo, grpo, reinforce_pp, reinforce_pp_baseline, rloo"
    )
    with pytest.raises(ValueError, match=message):
        group_advantages(FOUR, "gpro")
    with pytest.raises(ValueError, match="'gae' needs the values of a critic"):
        group_advantages(FOUR, "gae")


def test_reinforce_pp_compares_with_the_whole_batch():
    """By hand: 0, 1, 4, 6 have mean 2.75 and squares 6.0625 + 3.0625 ... = 22.75 around it; their groups' 0.5 and 2."""
    rewards = torch.tensor([[0.0, 1.0], [4.0, 6.0]], dtype=torch.float64)
    plain = [(x - 2.75) / (math.sqrt(22.75 / 3) + 1e-6) for x in (0, 1, 4, 6)]
    baseline = [x / (math.sqrt(2.5 / 3) + 1e-6) for x in (-0.5, 0.5, -1, 1)]
    assert group_advantages(rewards, "reinforce_pp").flatten().tolist() == pytest.approx(plain, rel=1e-14)
    assert group_advantages(rewards, "reinforce_pp_baseline").flatten().tolist() == pytest.approx(baseline, rel=1e-14)


def test_one_response_per_prompt_is_enough_for_reinforce_pp():
    assert group_advantages(torch.tensor([[1.0], [2.0], [3.0]]), "reinforce_pp").flatten().tolist() == pytest.approx(
        [-1, 0, 1],
        abs=2e-6,  # the 1e-6 beside the std
    )


@pytest.mark.parametrize("estimator", ["reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("cut", [(2, 3), (0, 5), (1, 1, 3)])
def test_whitening_is_over_all_ranks(estimator: str, cut: tuple[int, ...]):
    """Fails if a rank whitens its own share; some ranks have no prompt."""
    rewards = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 7

    def rank(mine: torch.Tensor, all_reduce) -> torch.Tensor:
        return group_advantages(mine, estimator, all_reduce)

    results = run_ranks([functools.partial(rank, mine) for mine in rewards.split(list(cut))])
    # float64 sums of 20 numbers in another order
    torch.testing.assert_close(torch.cat(results), group_advantages(rewards, estimator), rtol=1e-12, atol=1e-13)
    if cut[0]:
        assert (results[0] - group_advantages(rewards[: cut[0]], estimator)).abs().max() > 1e-3


def best_of(rewards: torch.Tensor, all_reduce) -> torch.Tensor:
    return (rewards == rewards.amax(dim=1, keepdim=True)).double()


def test_estimator_of_the_users_own():
    for choice in (best_of, f"{__name__}.best_of"):
        assert group_advantages(FOUR, choice).tolist() == [[0.0, 0.0, 0.0, 1.0]]
    with pytest.raises(ValueError, match=r"returned the shape \(1, 2\), finite: True, for rewards \(1, 4\)"):
        group_advantages(FOUR, lambda rewards, all_reduce: rewards[:, :2])
    with pytest.raises(ValueError, match="finite: False"):
        group_advantages(FOUR, lambda rewards, all_reduce: rewards / 0)
