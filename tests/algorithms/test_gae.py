import pytest
import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.gae import gae

NAN = float("nan")


def row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def everywhere(values: Tensor) -> Tensor:
    return torch.ones_like(values, dtype=torch.bool)


def test_three_tokens_by_hand():
    """γ = 0.9, λ = 0.5: δ = [0 + 0.45 - 0.2, 0 + 0.72 - 0.5, 1 - 0.8]; A_2 = 0.2, A_1 = δ_1 + 0.45 A_2, ..."""
    rewards, values = row(0, 0, 1), row(0.2, 0.5, 0.8)
    advantages, returns = gae(rewards, values, everywhere(values), gamma=0.9, lam=0.5)
    last, middle = 0.2, 0.22 + 0.45 * 0.2
    expected = [0.25 + 0.45 * middle, middle, last]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-15)  # float64 rounding
    assert returns.tolist() == pytest.approx([a + v for a, v in zip(expected, (0.2, 0.5, 0.8), strict=True)], abs=1e-15)


def random_rows() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 4, 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 9, generator=generator) < 0.6
    mask[3] = False  # a sequence without a token of the policy's
    return rewards, values, mask


def test_lambda_one_is_return_minus_value_and_lambda_zero_the_one_step_difference():
    rewards, values, _ = random_rows()
    whole, _ = gae(rewards, values, everywhere(values), gamma=1.0, lam=1.0)
    to_go = rewards.flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(whole, to_go - values, rtol=1e-12, atol=1e-13)  # float64 sums of 9
    one_step, _ = gae(rewards, values, everywhere(values), gamma=0.9, lam=0.0)
    after = torch.nn.functional.pad(values[:, 1:], (0, 1))
    torch.testing.assert_close(one_step, rewards + 0.9 * after - values, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("garbage", [NAN, float("inf"), 1e30])
def test_positions_that_do_not_count_are_stepped_over(garbage: float):
    """A masked row is the row of its counting tokens; what stands in the gaps (prompt, tool output) is never seen."""
    rewards, values, mask = random_rows()
    advantages, returns = gae(
        rewards.masked_fill(~mask, garbage), values.masked_fill(~mask, garbage), mask, gamma=0.9, lam=0.7
    )
    assert (advantages[~mask] == 0).all()
    assert (returns[~mask] == 0).all()
    for index in range(4):
        kept = mask[index]
        alone = gae(rewards[index][kept], values[index][kept], kept[kept], gamma=0.9, lam=0.7)
        assert torch.equal(advantages[index][kept], alone[0])
        assert torch.equal(returns[index][kept], alone[1])


def test_perfect_critic_has_no_advantage():
    values = row(1, 1, 1)
    advantages, returns = gae(row(0, 0, 1), values, everywhere(values))
    assert advantages.tolist() == [0, 0, 0]
    assert returns.tolist() == [1, 1, 1]


def test_no_gradient_reaches_the_critic():
    values = row(0.5, 0.5).requires_grad_()
    advantages, returns = gae(row(0, 1), values, everywhere(values))
    assert not advantages.requires_grad
    assert not returns.requires_grad


def test_bad_arguments_are_refused():
    values = row(1, 2)
    with pytest.raises(ValueError, match=r"rewards \(3,\), values \(2,\) and mask \(2,\)"):
        gae(row(1, 2, 3), values, everywhere(values))
    with pytest.raises(ValueError, match=r"lam=1.5 must be in \[0, 1\]"):
        gae(values, values, everywhere(values), lam=1.5)
