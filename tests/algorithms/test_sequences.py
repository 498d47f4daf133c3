import functools

import torch

from lightning_megatron_rl.algorithms.sequences import Sequences
from tests.algorithms.ranks import run_ranks

INDEX = torch.tensor([[0, 0, 2, 2, 2, -1], [3, 3, -1, -1, -1, -1]])
MASK = torch.tensor([[True, True, False, True, True, False], [False, False, False, False, False, False]])


def test_mean_over_the_counting_tokens_of_each_sequence():
    values = torch.tensor([[1.0, 3.0, float("nan"), 4.0, 6.0, float("inf")], [9.0] * 6])
    mean = Sequences(INDEX, MASK, 4).mean(values)
    # the masked token of sequence 2 gets its mean too; sequence 3 has no token that counts
    assert mean.tolist() == [[2.0, 2.0, 5.0, 5.0, 5.0, 0.0], [0.0] * 6]


def test_sum_over_the_counting_tokens_of_each_sequence():
    values = torch.tensor([[1.0, 3.0, float("nan"), 4.0, 6.0, float("inf")], [9.0] * 6])
    assert Sequences(INDEX, MASK, 4).sum(values).tolist() == [[4.0, 4.0, 10.0, 10.0, 10.0, 0.0], [0.0] * 6]


def test_ranks_that_share_sequences_agree():
    """Fails without the sum over ranks; the last rank holds padding only."""
    values = torch.arange(6, dtype=torch.float64)
    index, mask = torch.tensor([0, 0, 0, 0, 1, 1]), torch.ones(6, dtype=torch.bool)
    whole = Sequences(index, mask, 2).mean(values)

    def rank(columns: list[int], all_reduce) -> torch.Tensor:
        if not columns:
            nothing = torch.full((2,), -1)
            return Sequences(nothing, nothing >= 0, 2, all_reduce).mean(torch.zeros(2))
        return Sequences(index[columns], mask[columns], 2, all_reduce).mean(values[columns])

    first, second, third = run_ranks([functools.partial(rank, columns) for columns in ([0, 3, 5], [1, 2, 4], [])])
    assert torch.equal(first, whole[[0, 3, 5]])
    assert torch.equal(second, whole[[1, 2, 4]])
    assert third.tolist() == [0.0, 0.0]


def test_no_gradient_and_the_dtype_of_the_values():
    values = torch.ones(2, 6, requires_grad=True)
    mean = Sequences(INDEX, MASK, 4).mean(values)
    assert not mean.requires_grad
    assert mean.dtype == torch.float32
