"""How many groups a stream has, as that changes."""

import time

from lightning_megatron_rl.rollout.stream import StreamPlan
from lightning_megatron_rl.rollout.watch import AtBatch, StreamWatch
from lightning_megatron_rl.sample import Prompt


def test_changes_are_kept_and_what_there_was_at_a_batch():
    plan, watch = StreamPlan(1, 2, 3, num_generations=1), StreamWatch()
    plan.admit(Prompt([1], "", index=index) for index in range(3))
    before = time.monotonic()
    watch.note(plan)
    first, second, third = plan.begin(4)
    watch.note(plan)
    watch.note(plan)  # nothing new
    for group, length in ((first, 2), (second, 2), (third, 5)):
        group.responses[0].token_ids = [7] * length
    for group in (first, second):
        plan.finish(group)
    watch.note(plan)
    watch.note_batch(plan, 5, plan.take(5))
    counts = [(counts.ready, counts.under_way) for counts in watch.since(before)]
    assert counts == [(0, 0), (0, 3), (2, 1), (1, 1)]
    assert watch.at_batch == AtBatch(ready=1, under_way=1, oldest_age=1, num_dropped=0, selection=2 / 3 - 1)
    assert watch.since(watch.since(before)[-1].time) == []
    plan.drop_stale(7)
    watch.note_batch(plan, 7, [second, third])  # in the end nothing was selected
    assert watch.at_batch == AtBatch(ready=0, under_way=0, oldest_age=0, num_dropped=2, selection=0.0)
    assert third.age(7) == 3
