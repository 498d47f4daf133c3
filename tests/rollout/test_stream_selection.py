"""`StreamPlan` selects nothing: what is trained on in an epoch is what was sampled, long responses and short ones."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron_rl.rollout.stream import Group, StreamPlan
from lightning_megatron_rl.sample import Prompt

Sampled = tuple[int, tuple[int, ...], tuple[float, ...]]  # row, lengths and rewards of its responses
SIGMA = 1.2  # of the logarithm of lengths: one response in a hundred is 16 times as long as the median


def drive(plan: StreamPlan, rows: list[int], rng: random.Random) -> tuple[list[Sampled], list[Sampled]]:
    """Train an epoch; return what was begun and what was trained on. Between two steps the sampler goes on or waits."""
    begun: dict[int, Sampled] = {}
    used: list[Sampled] = []
    left: dict[int, float] = {}
    batch, ahead = plan.batch_size, (plan.max_staleness + 1) * plan.batch_size
    plan.admit(prompts(rows[:ahead]))

    def begin(version: int) -> None:
        for group in plan.begin(version):
            lengths = tuple(max(1, round(rng.lognormvariate(3, SIGMA))) for _ in group.responses)
            begun[group.number] = (group.prompt.index, lengths, tuple(1 / length for length in lengths))
            left[group.number] = max(lengths)

    def sample(tokens: float) -> None:
        for group in list(plan.under_way.values()):
            left[group.number] -= tokens
            if left[group.number] <= 0:
                plan.finish(group)

    for version in range(len(rows) // batch):
        if version:
            plan.admit(prompts(rows[ahead + (version - 1) * batch :][:batch]))
        for _ in range(batch // plan.part_size):
            begin(version)
            while not plan.can_take(version) and plan.under_way:
                sample(min(left[number] for number in plan.under_way))
                begin(version)
            if not plan.can_take(version):
                return list(begun.values()), used  # nothing is left of which a batch could be made
            used += [begun[group.number] for group in plan.take(version)]
            sample(rng.choice((0.0, rng.lognormvariate(3, SIGMA))))  # separate devices: beside the update
    return list(begun.values()), used


def prompts(rows: list[int]) -> list[Prompt]:
    return [Prompt([1], "x", index=row) for row in rows]


def check(admitted: list[int], begun: list[Sampled], used: list[Sampled]) -> None:
    """Prompts, lengths and rewards of what was trained on are those of what was admitted and sampled."""
    assert sorted(row for row, _, _ in used) == sorted(admitted)
    assert sorted(length for _, lengths, _ in used for length in lengths) == sorted(
        length for _, lengths, _ in begun for length in lengths
    )
    assert sorted(reward for _, _, rewards in used for reward in rewards) == sorted(
        reward for _, _, rewards in begun for reward in rewards
    )


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
@settings(max_examples=150, deadline=None)
@given(
    part_size=st.integers(1, 6),
    parts=st.integers(1, 3),
    more_in_flight=st.integers(0, 20),
    num_generations=st.integers(1, 4),
    steps=st.integers(1, 12),
    seed=st.integers(0, 10_000),
)
def test_what_is_trained_on_is_what_was_sampled(
    max_staleness, part_size, parts, more_in_flight, num_generations, steps, seed
):
    batch_size = part_size * parts
    rows = list(range(batch_size * steps))
    plan = StreamPlan(batch_size, max_staleness, batch_size + more_in_flight, num_generations, parts)
    check(rows, *drive(plan, rows, random.Random(seed)))
    assert plan.num_dropped == 0


class FirstFinished(StreamPlan):
    """Makes batches of whoever is complete first, and drops what gets too old: what a plan must not do."""

    def can_take(self, version: int) -> bool:
        return len(self.ready) >= self.batch_size

    def take(self, version: int) -> list[Group]:
        batch, self.ready = self.ready[: self.batch_size], self.ready[self.batch_size :]
        for group in list(self.under_way.values()):
            if group.age(version + 1) > self.max_staleness:
                del self.under_way[group.number]
        return batch


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_whoever_takes_the_first_ones_is_found(max_staleness):
    rows = list(range(8 * 40))

    def mean_length(sampled: list[Sampled]) -> float:
        lengths = [length for _, each, _ in sampled for length in each]
        return sum(lengths) / len(lengths)

    def run(make: Callable[..., StreamPlan]) -> tuple[list[Sampled], list[Sampled]]:
        return drive(make(8, max_staleness, 8 * (max_staleness + 1), 4), rows, random.Random(0))

    begun, used = run(FirstFinished)
    with pytest.raises(AssertionError):
        check(rows, begun, used)
    assert mean_length(used) < 0.95 * mean_length(begun)  # long responses are missing
    begun, used = run(StreamPlan)
    assert mean_length(used) == pytest.approx(mean_length(begun))
