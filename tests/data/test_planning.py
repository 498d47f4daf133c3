"""Plans of micro-batches: partitions within the budget, equal counts and equal work on all replicas."""

import random

import pytest

from lightning_megatron_rl.data import MicroBatchRules, SequenceCost, plan_microbatches, plan_replicas
from lightning_megatron_rl.data.planning import microbatch_shapes


def random_lengths(generator: random.Random) -> list[int]:
    return [generator.randint(1, generator.choice([3, 12, 40])) for _ in range(generator.randint(1, 40))]


def cost(lengths: list[int], bin_: list[int], packed: bool) -> int:
    return sum(lengths[i] for i in bin_) if packed else len(bin_) * max((lengths[i] for i in bin_), default=0)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_plan_is_a_partition_within_the_limit(packed: bool, seed: int):
    generator = random.Random(seed)
    lengths = random_lengths(generator)
    max_tokens = max(lengths) + generator.randint(0, 60)
    plan = plan_microbatches(lengths, max_tokens, packed=packed)
    assert sorted(i for bin_ in plan for i in bin_) == list(range(len(lengths)))
    assert all(bin_ and cost(lengths, bin_, packed) <= max_tokens for bin_ in plan)
    assert plan == plan_microbatches(lengths, max_tokens, packed=packed)
    # data-parallel ranks agree on the largest number: every number from the plan's own upwards must be met exactly
    for number in range(1, len(plan) + 4):
        larger = plan_microbatches(lengths, max_tokens, packed=packed, num_microbatches=number)
        assert len(larger) == max(number, len(plan))
        assert sorted(i for bin_ in larger for i in bin_) == list(range(len(lengths)))
        assert all(cost(lengths, bin_, packed) <= max_tokens for bin_ in larger)


def test_plan_is_balanced_and_small():
    lengths = [10] * 8 + [20] * 4  # 160 tokens; first fit at the limit 55 would give bins of 50, 50, 50 and 10
    assert [cost(lengths, bin_, True) for bin_ in plan_microbatches(lengths, 55)] == [40, 40, 40, 40]
    # padded bins hold neighbours in length, so none of these wastes a token
    assert [cost(lengths, bin_, False) for bin_ in plan_microbatches(lengths, 55, packed=False)] == [40, 40, 40, 40]
    # 1000 sequences of which no two fit together need 1000 bins
    assert len(plan_microbatches([600] * 1000, 1000)) == 1000


@pytest.mark.parametrize("packed", [True, False])
def test_asking_for_more_bins_fills_them_evenly_and_leaves_the_rest_empty(packed: bool):
    plan = plan_microbatches([4, 4, 4, 4], 100, packed=packed, num_microbatches=4)
    assert sorted(plan) == [[0], [1], [2], [3]]
    assert [len(bin_) for bin_ in plan_microbatches([4], 100, packed=packed, num_microbatches=3)] == [1, 0, 0]
    assert plan_microbatches([], 100, packed=packed) == []
    assert plan_microbatches([], 100, packed=packed, num_microbatches=2) == [[], []]


def test_too_long_sequence_is_refused_with_index_length_limit_and_remedy():
    with pytest.raises(ValueError, match=r"sequence 1 has 9 tokens.*max_tokens_per_microbatch=8.*at least 9"):
        plan_microbatches([3, 9], 8)


RULES = {
    "dp": MicroBatchRules(),
    "tp2_sp": MicroBatchRules(row_multiple=2),
    "cp2_tp2_sp": MicroBatchRules(sequence_multiple=4, row_multiple=8),
    "pp2_vpp2": MicroBatchRules(count_multiple=2, same_shape=True),
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("layout", RULES)
@pytest.mark.parametrize("seed", range(6))
def test_replicas_get_equally_many_micro_batches_that_fit(packed: bool, layout: str, seed: int):
    generator = random.Random(seed)
    lengths, rules, replicas = random_lengths(generator), RULES[layout], generator.randint(1, 4)
    max_tokens = max(lengths) + generator.randint(8, 60)
    options = {"replicas": replicas, "packed": packed, "rules": rules, "cost": SequenceCost(3.0, 0.1)}
    plans = plan_replicas(lengths, max_tokens, **options)
    assert plans == plan_replicas(lengths, max_tokens, **options)
    assert len(plans) == replicas
    assert sorted(index for plan in plans for bin_ in plan for index in bin_) == list(range(len(lengths)))
    assert len({len(plan) for plan in plans}) == 1
    assert plans[0]
    assert len(plans[0]) % rules.count_multiple == 0
    for plan in plans:
        shapes = microbatch_shapes(lengths, plan, packed=packed, rules=rules)
        assert all(width % rules.row_multiple == 0 for _, width in shapes)
        assert len(set(shapes)) == 1 or not rules.same_shape
        assert all(rows * width <= max_tokens for rows, width in shapes)


def test_work_is_balanced_by_cost_not_by_tokens():
    """One sequence of 1000 tokens costs as much attention as a hundred of 100: it gets a replica nearly to itself."""
    lengths, cost = [1000, *[100] * 100], SequenceCost(linear=0.0, quadratic=1.0)
    plans = plan_replicas(lengths, 10_000, replicas=2, cost=cost)
    work = [sum(cost(lengths[index]) for bin_ in plan for index in bin_) for plan in plans]
    assert max(work) / (sum(work) / 2) < 1.01
    by_tokens = plan_replicas(lengths, 10_000, replicas=2)
    work = [sum(cost(lengths[index]) for bin_ in plan for index in bin_) for plan in by_tokens]
    assert max(work) / (sum(work) / 2) > 1.4


@pytest.mark.parametrize("seed", range(3))
def test_replicas_of_a_long_tailed_rollout_differ_by_less_than_five_percent(seed: int):
    """Lengths as reasoning rollouts have them: most short, a few at the limit."""
    generator = random.Random(seed)
    lengths = [min(int(generator.lognormvariate(6.5, 1.0)) + 1, 8192) for _ in range(512)]
    cost = SequenceCost(linear=1.0, quadratic=1e-4)
    plans = plan_replicas(lengths, 16_384, replicas=8, cost=cost)
    work = [sum(cost(lengths[index]) for bin_ in plan for index in bin_) for plan in plans]
    assert max(work) / (sum(work) / 8) < 1.05


def test_empty_replicas_still_get_a_micro_batch():
    assert plan_replicas([], 8, replicas=2) == [[[]], [[]]]
    assert plan_replicas([3], 8, replicas=2, rules=MicroBatchRules(count_multiple=2)) == [[[0], []], [[], []]]


def test_padding_counts_in_the_budget():
    """Nine tokens take sixteen places in a row that must be a multiple of eight."""
    rules = MicroBatchRules(sequence_multiple=4, row_multiple=8)
    assert plan_microbatches([5, 5], 16, rules=rules) == [[0, 1]]
    with pytest.raises(
        ValueError, match=r"sequence 0 has 9 tokens \(16 with padding to a multiple of 8\).*at least 16"
    ):
        plan_microbatches([9], 15, rules=rules)
