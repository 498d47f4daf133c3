import functools
import math
import random

import pytest
import torch

from lightning_megatron_rl.algorithms.tally import Tally
from tests.algorithms.ranks import run_ranks

NAN = float("nan")
NUM_TOKENS = 97


def fill(tally: Tally, values: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """One metric of each kind, from one micro-batch."""
    tally.add_sum("sum", values, mask)
    tally.add_mean("mean", values, mask)
    tally.add_max("max", values, mask)
    tally.add_min("min", values, mask)
    tally.add_mean_std("mean2", "std", values, mask)


def reference(values: torch.Tensor) -> dict[str, float]:
    values = values.double()
    return {
        "sum": values.sum().item(),
        "mean": values.mean().item(),
        "max": values.max().item(),
        "min": values.min().item(),
        "mean2": values.mean().item(),
        "std": values.std().item(),
    }


def random_values() -> torch.Tensor:
    return torch.randn(NUM_TOKENS, generator=torch.Generator().manual_seed(0)) + 2


def cuts(pieces: int) -> list[list[int]]:
    """A partition of the token positions into `pieces`, of random sizes and order; some may be empty."""
    rng = random.Random(pieces)
    parts: list[list[int]] = [[] for _ in range(pieces)]
    for position in rng.sample(range(NUM_TOKENS), NUM_TOKENS):
        parts[rng.randrange(pieces)].append(position)
    return parts


def assert_metrics_equal(computed: dict[str, float], expected: dict[str, float]) -> None:
    # float64 sums of 97 numbers in another order
    assert computed == {name: pytest.approx(value, rel=1e-12) for name, value in expected.items()}


@pytest.mark.parametrize("pieces", [1, 2, 5, 60])
def test_micro_batches_and_merged_tallies_add_up(pieces: int):
    values = random_values()
    halves = [Tally(), Tally()]
    for number, positions in enumerate(cuts(pieces)):
        fill(halves[number % 2], values[positions])
    halves[0].merge(halves[1])
    assert_metrics_equal(halves[0].compute(), reference(values))


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_ranks_add_up_with_one_sum_and_one_max(pieces: int):
    values = random_values()

    def rank(positions: list[int], all_reduce) -> dict[str, float]:
        tally, calls = Tally(), []
        fill(tally, values[positions])

        def counted(vector: torch.Tensor, op: str) -> torch.Tensor:
            calls.append(op)
            assert vector.dtype == torch.float64
            return all_reduce(vector, op)

        reduced = tally.reduce(counted)
        assert calls == ["sum", "max"]
        return reduced.compute()

    results = run_ranks([functools.partial(rank, positions) for positions in cuts(pieces)])
    assert_metrics_equal(results[0], reference(values))
    assert all(result == results[0] for result in results)  # equal bits on every rank


def test_rank_without_values_registers_its_names_with_empty_tensors():
    values = random_values()

    def rank(mine: torch.Tensor, all_reduce) -> dict[str, float]:
        tally = Tally()
        fill(tally, mine)
        return tally.reduce(all_reduce).compute()

    results = run_ranks([functools.partial(rank, values), functools.partial(rank, torch.empty(0))])
    assert_metrics_equal(results[1], reference(values))


def test_different_names_on_the_ranks_are_refused():
    def rank(name: str, all_reduce) -> Tally:
        tally = Tally()
        tally.add_mean(name, [1.0])
        try:
            return tally.reduce(all_reduce)
        except RuntimeError as error:
            return str(error)

    messages = run_ranks([functools.partial(rank, "a"), functools.partial(rank, "b")])
    assert all("2 ranks hold metrics of different names" in message for message in messages)
    assert "'a'" in messages[0]
    assert "'b'" in messages[1]


def test_reduce_leaves_the_local_tally_as_it_is():
    tally = Tally()
    tally.add_mean("x", [1.0, 2.0])
    assert tally.reduce(lambda vector, op: vector * 2).compute() == tally.compute() == {"x": 1.5}


@pytest.mark.parametrize("garbage", [NAN, float("inf"), float("-inf"), 1e30, -1e30])
def test_masked_positions_never_leak(garbage: float):
    values = random_values()
    mask = torch.ones(NUM_TOKENS + 3, dtype=torch.bool)
    mask[[0, 50, 99]] = False
    padded = torch.full((NUM_TOKENS + 3,), garbage)
    padded[mask] = values
    tally = Tally()
    fill(tally, padded.reshape(2, 50), mask.reshape(2, 50))
    assert_metrics_equal(tally.compute(), reference(values))


def test_minimum_of_positive_and_maximum_of_negative_values():
    """Masked positions that became zeros would win here."""
    tally = Tally()
    mask = torch.tensor([True, False])
    tally.add_min("min", torch.tensor([5.0, -7.0]), mask)
    tally.add_max("max", torch.tensor([-5.0, 7.0]), mask)
    assert tally.compute() == {"max": -5.0, "min": 5.0}


def test_nan_that_counts_is_not_hidden():
    tally = Tally()
    fill(tally, torch.tensor([1.0, NAN, 3.0]))
    assert all(math.isnan(value) for value in tally.compute().values())
    # some backends' maximum drops a nan
    reduced = tally.reduce(lambda vector, op: vector if op == "sum" else vector.nan_to_num(nan=2.0))
    assert all(math.isnan(value) for value in reduced.compute().values())


def test_nothing_counted_is_nan_and_a_sum_zero():
    tally = Tally()
    fill(tally, torch.ones(3), torch.zeros(3, dtype=torch.bool))
    computed = tally.compute()
    assert computed.pop("sum") == 0.0
    assert all(math.isnan(value) for value in computed.values())


def test_std_of_equal_values_is_exactly_zero():
    values = torch.full((3,), 0.1, dtype=torch.float64)
    # this is what rounding leaves
    assert abs((values.square().sum() - values.sum() ** 2 / 3).item()) > 0
    tally = Tally()
    tally.add_mean_std("mean", "std", values)
    tally.add_mean_std("one_mean", "one_std", [0.7])
    computed = tally.compute()
    assert computed["std"] == 0.0
    assert computed["one_std"] == 0.0


def test_bools_integers_and_low_precision_are_summed_in_float64():
    tally = Tally()
    tally.add_mean("bool", torch.tensor([True, False]))
    tally.add_sum("bf16", torch.ones(1000, dtype=torch.bfloat16))  # bf16 sums stop at 256
    tally.add_sum("int", torch.tensor([2**40, 1]))
    assert tally.compute() == {"bool": 0.5, "bf16": 1000.0, "int": 2.0**40 + 1}


def test_values_keep_no_graph():
    tally = Tally()
    fill(tally, torch.ones(2, requires_grad=True))
    assert not any(part.requires_grad for part in [*tally._sums.values(), *tally._maxima.values()])


def rms(squares: float, count: float) -> float:
    return math.sqrt(squares / count)


def test_own_formula():
    tally = Tally()
    for part in (torch.tensor([3.0]), torch.tensor([4.0, 5.0])):
        tally.add("rms", rms, {"squares": part.square().sum(), "count": torch.tensor(len(part))})
    assert tally.compute() == {"rms": math.sqrt(50 / 3)}


def test_one_name_with_two_formulas_is_refused():
    tally, other = Tally(), Tally()
    tally.add_mean("x", [1.0])
    other.add_max("x", [1.0])
    with pytest.raises(ValueError, match="'x' is already a metric with another formula"):
        tally.add_sum("x", [1.0])
    with pytest.raises(ValueError, match="'x' is already a metric with another formula"):
        tally.merge(other)


@pytest.mark.parametrize("mask", [torch.ones(3, dtype=torch.long), torch.ones(1, dtype=torch.bool)])
def test_mask_must_be_bool_and_of_the_values_shape(mask: torch.Tensor):
    with pytest.raises(ValueError, match="pass a bool mask of the values' shape"):
        Tally().add_mean("x", torch.ones(3), mask)


def test_empty_tally():
    assert Tally().compute() == {}
    assert Tally().reduce(lambda vector, op: vector).compute() == {}
