"""`StreamPlan`: the bound is never broken, every prompt is used exactly once, and nothing waits for ever."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron_rl.rollout.protocol import Progress, SamplingParams, StreamRequest
from lightning_megatron_rl.rollout.stream import SparePrompts, StreamPlan, divide_states, rows_of, state_of_rows
from lightning_megatron_rl.rollout.streaming import RolloutStream
from lightning_megatron_rl.sample import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt([1], "x", index=index) for index in range(count)]


def drive(plan: StreamPlan, steps: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Train `steps` versions; responses end in random order, long ones late. Return rows and ages in order of use."""
    rows, ages = [], []
    ends: dict[int, list[float]] = {}  # of a group's responses
    now = 0.0
    for version in range(steps):
        for _ in range(plan.batch_size // plan.part_size):
            now = wait(plan, version, now, ends, rng)
            for group in plan.take(version):
                rows.append(group.prompt.index)
                ages.append(group.age(version))
        assert plan.num_taken == 0
    return rows, ages


def wait(plan: StreamPlan, version: int, now: float, ends: dict[int, list[float]], rng: random.Random) -> float:
    """Go on until there is a batch, or its next part; return the time."""
    while True:
        for group in plan.begin(version):
            ends[group.number] = [now + rng.lognormvariate(0, 1.5) for _ in group.responses]
        assert plan.num_growing <= plan.in_flight * plan.num_generations
        groups = len(plan.under_way) + len(plan.ready) + plan.num_taken
        assert groups <= (plan.max_staleness + 1) * plan.batch_size
        if plan.can_take(version):
            return now
        assert plan.under_way, f"nothing is under way and there is no batch: {plan.describe()}"
        now = min(end for number in plan.under_way for end in ends[number] if end > now)
        for group in list(plan.under_way.values()):
            for response, end in zip(group.responses, ends[group.number], strict=True):
                response.finish_reason = "stop" if end <= now else None
            if group.is_complete:
                plan.finish(group)


@settings(max_examples=300, deadline=None)
@given(
    part_size=st.integers(1, 6),
    parts=st.integers(1, 4),
    max_staleness=st.integers(0, 5),
    more_in_flight=st.integers(0, 20),
    steps=st.integers(1, 12),
    seed=st.integers(0, 10_000),
)
def test_bound_holds_and_every_prompt_is_used_once(part_size, parts, max_staleness, more_in_flight, steps, seed):
    batch_size = part_size * parts
    plan = StreamPlan(batch_size, max_staleness, batch_size + more_in_flight, num_generations=2, parts=parts)
    plan.admit(prompts(batch_size * steps))
    rows, ages = drive(plan, steps, random.Random(seed))
    assert max(ages) <= max_staleness
    assert sorted(rows) == list(range(batch_size * steps))
    assert plan.num_dropped == 0


def test_a_group_with_one_long_response_leaves_room():
    plan = StreamPlan(2, 1, 2, num_generations=4)
    plan.admit(prompts(4))
    first, _ = plan.begin(0)
    for number, response in enumerate(first.responses[:3], start=1):
        response.finish_reason = "stop"
        assert (plan.num_growing, plan.begin(0)) == (8 - number, [])
    first.responses[3].finish_reason = "stop"  # its reward is still computed
    assert [group.prompt.index for group in plan.begin(0)] == [2]
    assert (plan.num_growing, plan.begin(0)) == (8, [])


def test_counting_alone_would_break_the_bound():
    """What `can_take` is for: with the number of groups as the only rule a long group gets older than the bound."""

    class Counted(StreamPlan):
        def can_take(self, version: int) -> bool:
            return len(self.ready) >= self.batch_size

    plan = Counted(2, 1, 8, num_generations=1)
    plan.admit(prompts(40))
    with pytest.raises(RuntimeError, match="versions old, max_staleness is 1"):
        drive(plan, 20, random.Random(0))


def test_parts_without_room_for_what_is_due_would_break_the_bound():
    """A part is not just so many groups, either: the rest of the batch may be too small for those that are due."""

    class Counted(StreamPlan):
        def can_take(self, version: int) -> bool:
            last = self.num_taken + self.part_size == self.batch_size
            return super().can_take(version) if last else len(self.ready) >= self.part_size

    plan = Counted(2, 1, 8, num_generations=1, parts=2)
    plan.admit(prompts(40))
    with pytest.raises(RuntimeError, match="versions old, max_staleness is 1"):
        drive(plan, 20, random.Random(0))


def test_a_part_is_given_out_before_the_batch_is_complete():
    plan = StreamPlan(2, 1, 4, num_generations=1, parts=2)
    plan.admit(prompts(4))
    first, second, *_ = plan.begin(0)
    assert not plan.can_take(0)
    plan.finish(second)
    assert plan.take(0) == [second]
    assert (plan.num_taken, plan.can_take(0)) == (1, False)
    plan.finish(first)
    assert plan.take(0) == [first]
    assert plan.num_taken == 0


def test_without_staleness_a_batch_is_what_was_admitted():
    plan = StreamPlan(3, 0, 3, num_generations=1)
    plan.admit(prompts(12))
    rows, ages = drive(plan, 4, random.Random(1))
    assert rows == list(range(12))
    assert set(ages) == {0}


def test_what_is_too_old_is_dropped_and_its_prompt_admitted_again():
    plan = StreamPlan(2, 2, 6, num_generations=1)
    plan.admit(prompts(4))
    first = plan.begin(0)
    plan.finish(first[1])
    plan.max_staleness = 0  # as a checkpoint that is resumed with a smaller bound
    assert [group.prompt.index for group in plan.drop_stale(1)] == [0, 1, 2, 3]
    assert [prompt.index for prompt in plan.waiting] == [0, 1, 2, 3]
    assert (plan.num_dropped, plan.under_way, plan.ready) == (4, {}, [])


@pytest.mark.parametrize("parts", [1, 2])
def test_prompts_that_were_read_for_a_larger_bound_wait(parts):
    """As an epoch has that is resumed with a smaller one: what begins too early would be too old in the end."""
    plan, used = StreamPlan(4, 1, 8, 2, parts), []
    plan.admit(prompts(40))
    for version in range(10):
        assert not plan.drop_stale(version)
        for _ in range(parts):
            plan.begin(version)
            for group in list(plan.under_way.values()):
                plan.finish(group)
            used += [group.prompt.index for group in plan.take(version)]
            plan.begin(version)  # beside the trainer's work
    assert used == list(range(40))


def test_a_batch_that_is_not_there_is_refused():
    plan = StreamPlan(2, 1, 4, num_generations=1)
    plan.admit(prompts(1))
    plan.begin(0)
    with pytest.raises(RuntimeError, match="no batch of 2 groups for version 0: 0 groups ready, 1 under way, 0"):
        plan.take(0)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (2, 2)])
def test_as_many_prompts_come_to_each_replica(before, after):
    """Odd numbers of groups and of prompts that wait: one replica must not get the larger part of both."""
    states, rows = [], iter(range(100))
    for rank in range(before):
        num_groups, num_waiting = (3, 9) if before == 1 else (5 + rank, 7 - rank)
        groups = [{"number": number, "row": next(rows), "born": number // 2} for number in range(num_groups)]
        waiting = [next(rows) for _ in range(num_waiting)]
        states.append(json.dumps({"waiting": waiting, "groups": groups, "num_born": 9}))
    found = [json.loads(state) for state in divide_states(states, after)]
    held = [[*(group["row"] for group in part["groups"]), *part["waiting"]] for part in found]
    assert sorted(row for part in held for row in part) == list(range(12 * before))
    assert len({len(part) for part in held}) == 1
    for part in found:
        numbers = [group["number"] for group in part["groups"]]
        assert len(set(numbers)) == len(numbers)
        assert max(numbers) < part["num_born"]


def reversed_if_odd(turn: int) -> list[Prompt]:
    return prompts(10)[:: -1 if turn % 2 else 1]


def test_spare_prompts_go_through_the_training_set():
    """Each replica has its share of a pass; what is under way is left out; a restored count goes on."""
    spares = [SparePrompts(reversed_if_odd, rank, 2, limit=4) for rank in range(2)]
    drawn = [[spare.draw(set()) for _ in range(5)] for spare in spares]
    assert sorted(prompt.index for share in drawn for prompt in share if prompt) == list(range(10))
    second = spares[0].draw({9, 7})
    assert second is not None
    assert second.index == 5
    restored = SparePrompts(reversed_if_odd, 0, 2, limit=4)
    restored.num_drawn = spares[0].num_drawn
    assert restored.draw(set()) == spares[0].draw(set())
    assert spares[0].draw(set(range(10))) is None


def test_a_group_that_is_replaced_makes_room():
    plan = StreamPlan(1, 1, 2, num_generations=1)
    plan.admit(prompts(3))
    flat, other = plan.begin(0)
    plan.replace(flat, Prompt([1], "spare", index=9))
    assert [group.prompt.index for group in plan.begin(0)] == [9]
    assert {group.prompt.index for group in plan.under_way.values()} == {other.prompt.index, 9}


def test_rows_of_a_state():
    """Those that were begun come first, the oldest before others."""
    groups = [
        {"number": 4, "born": 2, "row": 7},
        {"number": 3, "born": 1, "row": 5},
        {"number": 5, "born": 2, "row": 6},
    ]
    assert rows_of(json.dumps({"waiting": [1, 2], "groups": groups})) == [5, 7, 6, 1, 2]
    assert rows_of(state_of_rows([3, 1])) == [3, 1]


class OneToken:
    """A streaming engine whose responses are one token; notes the prompt and seed of each request."""

    max_model_len = 64

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.waiting: list[StreamRequest] = []

    def submit(self, requests: list[StreamRequest], params: SamplingParams) -> None:
        self.seen += [(request.token_ids[0], request.seed) for request in requests]
        self.waiting += requests

    def collect(self, wait_s: float, *, everything: bool = False) -> list[Progress]:
        answers = [Progress(request.name, [7], [-1.0], [(0, 1)], "stop") for request in self.waiting]
        self.waiting = []
        return answers

    def hold(self) -> None:
        pass

    def withdraw(self) -> list[Progress]:
        return []


def test_no_prompt_is_drawn_twice_with_the_same_weights(tokenizer):
    """Its responses would be the same ones, and have no spread again."""
    engine, everything = OneToken(), [Prompt([5 + row], "x", index=row) for row in range(6)]
    stream = RolloutStream(
        engine,
        StreamPlan(2, 1, 4, num_generations=2),
        SamplingParams(max_tokens=4),
        tokenizer=tokenizer,
        seed=1,
        reward=lambda samples: None,  # all of them get 0
        spares=SparePrompts(lambda turn: everything, rank=0, replicas=1, limit=6),
    )
    samples = stream.next_batch(everything[:4], version=0)
    stream.close()
    assert len(samples) == 4
    assert len(set(engine.seen)) == len(engine.seen)
