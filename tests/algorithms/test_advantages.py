import math

import pytest
import torch

from lightning_megatron_rl.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    group_advantages,
    zero_spread,
    zero_spread_fraction,
)

FOUR = torch.tensor([[1.0, 2.0, 3.0, 4.0]])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # unbiased std of 1, 2, 3, 4 is sqrt(5/3)
        ("grpo", [x / (math.sqrt(5 / 3) + 1e-6) for x in (-1.5, -0.5, 0.5, 1.5)]),
        ("dr_grpo", [-1.5, -0.5, 0.5, 1.5]),
        ("rloo", [1 - 3.0, 2 - 8 / 3, 3 - 7 / 3, 4 - 2.0]),  # each minus the mean of the others
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


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS)
def test_rows_do_not_know_each_other(estimator: str):
    rewards = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([group_advantages(row[None], estimator) for row in rewards])
    assert torch.equal(group_advantages(rewards, estimator), rows)


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS)
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


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS)
def test_one_response_per_prompt_is_refused(estimator: str):
    with pytest.raises(ValueError, match="num_generations is 1: set num_generations to at least 2"):
        group_advantages(torch.ones(3, 1), estimator)


def test_flat_rewards_are_refused():
    with pytest.raises(ValueError, match=r"\[prompts, generations\], got the shape \(8,\)"):
        group_advantages(torch.ones(8), "grpo")


def test_unknown_estimator():
    with pytest.raises(ValueError, match="unknown advantage estimator 'gpro': choose one of dr_grpo, grpo, rloo"):
        group_advantages(FOUR, "gpro")
