import functools
import random

import pytest
import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.aggregation import AGGREGATIONS, sequence_weights, weighted_sum
from tests.algorithms.ranks import run_ranks

LENGTHS = [3, 5, 1, 4, 0, 2, 7, 2]  # [sequences], one of them empty
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]
MAX_LENGTH = 8


def one_rank(vector: Tensor) -> Tensor:
    return vector


def losses(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator, dtype=torch.float64) for n in LENGTHS]


def reference(mode: str, sequences: list[Tensor]) -> float:
    """The formulas of the five modes, over lists of token losses."""
    rows = [row.tolist() for row in sequences]
    match mode:
        case "token_mean":
            return sum(map(sum, rows)) / sum(map(len, rows))
        case "seq_mean_token_mean":
            return sum(sum(row) / len(row) for row in rows if row) / len(rows)
        case "seq_mean_token_sum":
            return sum(map(sum, rows)) / len(rows)
        case "seq_mean_token_sum_norm":
            return sum(map(sum, rows)) / (len(rows) * MAX_LENGTH)
        case "prompt_mean":
            groups = [[token for row in rows[i : i + 4] for token in row] for i in (0, 4)]
            return sum(sum(group) / len(group) for group in groups) / 2
    raise AssertionError(mode)


def aggregate(mode: str, sequences: list[Tensor], indices: list[int], micro_batches: int, all_reduce) -> float:
    """One rank's share of the loss, over micro-batches with sequences in any order."""
    lengths = torch.tensor([len(sequences[i]) for i in indices], dtype=torch.long)
    groups = torch.tensor([GROUPS[i] for i in indices], dtype=torch.long)
    weights = sequence_weights(mode, lengths, groups, max_response_length=MAX_LENGTH, all_reduce=all_reduce)
    assert weights.dtype == torch.float64
    assert weights.shape == lengths.shape
    share = 0.0
    for part in range(micro_batches):
        positions = range(part, len(indices), micro_batches)
        for position in positions:  # a packed micro-batch
            tokens = sequences[indices[position]]
            index = torch.full((len(tokens),), position)
            share += weighted_sum(tokens, weights, index).item()
    return share


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_formula_for_every_cut_into_micro_batches(mode: str, micro_batches: int):
    order = list(range(8))
    random.Random(micro_batches).shuffle(order)
    # float64 sums of 24 tokens in another order
    assert aggregate(mode, losses(), order, micro_batches, one_rank) == pytest.approx(
        reference(mode, losses()), abs=1e-12
    )


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize(
    "cut", [([0, 1, 2, 3], [4, 5, 6, 7]), ([7, 6, 5, 4, 0, 3, 1, 2], []), ([], [0, 1, 2, 3, 4, 5, 6, 7])]
)
def test_ranks_add_up_to_the_formula(mode: str, cut: tuple[list[int], list[int]]):
    shares = run_ranks(
        [functools.partial(aggregate, mode, losses(), indices, rank + 1) for rank, indices in enumerate(cut)]
    )
    # float64 sums of 24 tokens in another order
    assert sum(shares) == pytest.approx(reference(mode, losses()), abs=1e-12)


def test_equal_group_numbers_on_two_ranks_are_two_groups():
    def rank(all_reduce) -> list[float]:
        lengths, groups = torch.tensor([1, 3]), torch.tensor([0, 0])
        return sequence_weights("prompt_mean", lengths, groups, max_response_length=8, all_reduce=all_reduce).tolist()

    assert run_ranks([rank, rank]) == [[1 / 8, 1 / 8]] * 2


def test_denominators_per_rank_would_differ():
    """The trap: a mean of the ranks' own token means is another number when the ranks' lengths differ."""
    own = [aggregate("token_mean", losses(), indices, 1, one_rank) for indices in ([0, 1, 2, 3], [4, 5, 6, 7])]
    assert abs(sum(own) / 2 - reference("token_mean", losses())) > 1e-3


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", [1 / 4, 1 / 4, 0.0]),
        ("seq_mean_token_mean", [1 / 3, 1 / 9, 0.0]),
        ("seq_mean_token_sum", [1 / 3, 1 / 3, 0.0]),
        ("seq_mean_token_sum_norm", [1 / 24, 1 / 24, 0.0]),
        ("prompt_mean", [1 / 8, 1 / 8, 0.0]),
    ],
)
def test_empty_sequence_counts_but_weighs_nothing(mode: str, expected: list[float]):
    lengths, groups = torch.tensor([1, 3, 0]), torch.tensor([7, 7, 3])
    weights = sequence_weights(mode, lengths, groups, max_response_length=8, all_reduce=one_rank)
    assert weights.tolist() == pytest.approx(expected, rel=1e-15)  # one division


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_only_empty_sequences(mode: str):
    lengths = torch.zeros(2, dtype=torch.long)
    weights = sequence_weights(mode, lengths, lengths, max_response_length=8, all_reduce=one_rank)
    assert weights.tolist() == [0.0, 0.0]


def test_weighted_sum_has_the_gradient_of_its_weights():
    values = torch.ones(3, requires_grad=True)
    index = torch.tensor([0, 1, 1])
    weighted_sum(values, torch.tensor([0.5, 0.25], dtype=torch.float64), index).backward()
    assert values.grad.tolist() == [0.5, 0.25, 0.25]


def test_bad_arguments_are_refused():
    ones = torch.ones(2, dtype=torch.long)
    with pytest.raises(ValueError, match="unknown aggregation 'mean': choose one of prompt_mean, seq_mean_token_mean"):
        sequence_weights("mean", ones, ones, max_response_length=8, all_reduce=one_rank)
    with pytest.raises(ValueError, match=r"response_lengths \(2,\) and group_index \(1,\)"):
        sequence_weights("token_mean", ones, ones[:1], max_response_length=8, all_reduce=one_rank)
    with pytest.raises(ValueError, match="max_response_length is 0"):
        sequence_weights("token_mean", ones, ones, max_response_length=0, all_reduce=one_rank)
    for wrong in (lambda counts, lengths, *_: 1 / lengths[:, None], lambda counts, lengths, *_: lengths[:1]):
        with pytest.raises(
            ValueError, match=r"returned weights of shape \[.*\] for 2 sequences: return a tensor \[2\]"
        ):
            sequence_weights(wrong, ones, ones, max_response_length=8, all_reduce=one_rank)
