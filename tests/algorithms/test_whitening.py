import functools

import pytest
import torch

from lightning_megatron_rl.algorithms.whitening import whiten
from tests.algorithms.ranks import run_ranks


def values() -> torch.Tensor:
    return torch.randn(23, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 5 + 100


def test_by_hand():
    # squares around the mean 2 add up to 2, over n - 1 = 2: the std is 1, beside which stands 1e-6
    assert whiten(torch.tensor([1.0, 2.0, 3.0])).tolist() == pytest.approx([-1, 0, 1], abs=2e-6)


@pytest.mark.parametrize("sizes", [[10, 13], [0, 23], [1, 2, 20]])
def test_ranks_whiten_together(sizes: list[int]):
    """Fails if a rank takes its own mean or std; one of them may have no value at all."""

    def rank(mine: torch.Tensor, all_reduce) -> torch.Tensor:
        return whiten(mine, all_reduce=all_reduce)

    parts = run_ranks([functools.partial(rank, mine) for mine in values().split(sizes)])
    torch.testing.assert_close(torch.cat(parts), whiten(values()), rtol=1e-12, atol=1e-13)  # float64 sums
    whole = torch.cat(parts)
    assert whole.mean().abs() < 1e-13
    assert whole.std().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_masked_values_are_never_looked_at(garbage: float):
    mask = torch.rand(23, generator=torch.Generator().manual_seed(1)) < 0.6
    whitened = whiten(values().masked_fill(~mask, garbage), mask)
    torch.testing.assert_close(whitened[mask], whiten(values()[mask]), rtol=1e-12, atol=1e-13)  # float64 sums
    assert (whitened[~mask] == 0).all()


def test_large_common_offset_costs_no_digits():
    offset = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64) + 2.0**40
    assert torch.equal(whiten(offset), whiten(offset - 2.0**40))


@pytest.mark.parametrize("size", [0, 1, 4])
def test_no_spread_is_zero(size: int):
    assert whiten(torch.full((size,), 3.0)).tolist() == [0.0] * size
