"""The fullest moment of a run: who is on the GPU while the trainer computes and steps, weights go, and samples come."""

from dataclasses import replace

import pytest

from lightning_megatron_rl.planner.moments import (
    COMPUTING,
    GIB,
    PUSHING,
    SAMPLING,
    STEPPING,
    WRAPPING,
    MemoryPlan,
    Part,
)


def parts(**sizes: float) -> tuple[Part, ...]:
    """Parts of so many GiB; `trainer_optimizer_state` is "trainer: optimizer state"."""
    found = []
    for name, size in sizes.items():
        owner, what = name.split("_", 1)
        found.append(Part(f"{owner}: {what.replace('_', ' ')}", size * GIB, "", f"lower {what}"))
    return tuple(found)


TRAINER = parts(
    trainer_process=1, trainer_weights=10, trainer_gradients=20, trainer_optimizer_state=30, trainer_activations=25
)
# weights 12 and cache 28 of a sampler in a process of its own
PROCESS, WEIGHTS, CACHE = parts(sampler_process=1, sampler_weights=12, sampler_cache=28)
SAMPLER = (PROCESS, WEIGHTS, replace(CACHE, pushed=0))


def totals(plan: MemoryPlan) -> dict[str, float]:
    return {moment: total / GIB for moment, total in plan.totals.items()}


def test_sampler_that_sleeps_counts_only_while_it_is_awake():
    trainer = (Part("trainer: weights", 30 * GIB, "", ""), Part("trainer: activations", 40 * GIB, "", ""))
    sampler = (Part("sampler: weights and cache", 40 * GIB, "", ""),)
    assert MemoryPlan(trainer, sampler, free=80 * GIB).needed == 110 * GIB
    plan = MemoryPlan(trainer, sampler, free=80 * GIB, apart=True)
    assert plan.needed == 70 * GIB
    plan.check()


@pytest.mark.parametrize(("free", "has_room"), [(127 / 0.9 + 0.1, True), (127 / 0.9 - 0.1, False)])
def test_a_sampler_need_not_sleep_where_all_fits_with_a_tenth_to_spare(free, has_room):
    plan = MemoryPlan(TRAINER, SAMPLER, free=free * GIB, apart=True)  # 86 and 41 at once
    assert plan.has_room_for_both == has_room
    plan.check()  # both are allowed


def test_a_plan_as_plain_data_has_the_trainer_s_own_most():
    plan = MemoryPlan(TRAINER, SAMPLER, free=80 * GIB, apart=True, offloads=("optimizer", "gradients"))
    found = plan.record()
    assert found["trainer_gib"] == 86  # all five parts, while it computes; the process of the sampler is not its own
    assert (found["needed_gib"], found["free_gib"], found["moment"]) == (87, 80, COMPUTING)
    assert found["text"] == plan.describe()


def test_sampler_that_never_sleeps_is_there_while_the_trainer_computes():
    plan = MemoryPlan(TRAINER, SAMPLER, free=80 * GIB, offloads=("optimizer", "gradients", "parameters"))
    assert totals(plan) == {COMPUTING: 86 + 41}  # what the trainer moves away lowers no peak


@pytest.mark.parametrize(
    ("offloads", "pushing", "sampling"),
    [
        # the trainer without activations is 61, the sampler with its weights 13 and with its cache 41
        ((), 61 + 13, 61 + 41),
        (("optimizer",), 31 + 13, 31 + 41),
        (("optimizer", "gradients"), 11 + 13, 11 + 41),
        # parameters are read while they are pushed, and go afterwards
        (("parameters",), 61 + 13, 51 + 41),
        (("optimizer", "gradients", "parameters"), 11 + 13, 1 + 41),
    ],
)
def test_what_is_offloaded_is_away_while_the_sampler_is_awake(offloads, pushing, sampling):
    plan = MemoryPlan(TRAINER, SAMPLER, free=200 * GIB, apart=True, offloads=offloads)
    # asleep it keeps its process
    assert totals(plan) == {COMPUTING: 86 + 1, PUSHING: pushing, SAMPLING: sampling}
    assert plan.needed == max(87, pushing, sampling) * GIB


def test_state_of_experts_is_offloaded_with_the_rest():
    trainer = (*TRAINER, Part("trainer: optimizer state, experts", 40 * GIB, "", ""))
    plan = MemoryPlan(trainer, SAMPLER, free=80 * GIB, apart=True, offloads=("optimizer", "gradients"))
    assert totals(plan)[SAMPLING] == 11 + 41


def test_weights_may_be_the_fullest_moment_where_the_cache_is_small():
    # 70 of weights on both sides, a cache of 2: while weights are pushed both are there, afterwards the trainer's go
    trainer = parts(trainer_process=1, trainer_weights=35, trainer_activations=5)
    sampler = (*parts(sampler_weights=35), replace(CACHE, size=2 * GIB, pushed=0))
    plan = MemoryPlan(trainer, sampler, free=80 * GIB, apart=True, offloads=("parameters",))
    assert totals(plan) == {PUSHING: 71, COMPUTING: 41, SAMPLING: 38}
    # one part of which only the weights wake first
    share = (Part("sampler: weights and cache", 37 * GIB, "", "", pushed=35 * GIB),)
    assert totals(replace(plan, sampler=share)) == {PUSHING: 71, COMPUTING: 41, SAMPLING: 38}


def test_step_has_its_copies_and_no_activations():
    trainer = (*TRAINER, Part("trainer: copies for the step", 40 * GIB, "", "lower copies"))
    plan = MemoryPlan(trainer, SAMPLER, free=200 * GIB, apart=True)
    assert totals(plan) == {STEPPING: 61 + 40 + 1, SAMPLING: 61 + 41, COMPUTING: 86 + 1, PUSHING: 61 + 13}
    assert totals(replace(plan, sampler=())) == {STEPPING: 101, COMPUTING: 86}


def test_start_has_weights_twice_and_no_optimizer():
    trainer = (*TRAINER, Part("trainer: weights, old and new", 10 * GIB, "", ""))
    plan = MemoryPlan(trainer, (), free=200 * GIB)
    assert totals(plan) == {COMPUTING: 86, WRAPPING: 31 + 10}
    # a sampler in another process may still be loading
    assert totals(replace(plan, sampler=SAMPLER)) == {COMPUTING: 86 + 41, WRAPPING: 42}


def test_description_says_which_moment_is_the_fullest_and_who_is_away_then():
    trainer = (*TRAINER, Part("trainer: copies for the step", 2 * GIB, "", ""))
    plan = MemoryPlan(trainer, SAMPLER, free=80 * GIB, apart=True)
    text = plan.describe()
    assert (
        "102.00 GiB  while the sampler works; 87.00 while the trainer computes; 74.00 while weights are pushed; "
        "64.00 while the optimizer steps" in text
    )
    (activations,) = [line for line in text.splitlines() if line.startswith("trainer: activations")]
    assert activations.endswith("(0.00 GiB then)")
    assert "copies" not in text  # what exists for a moment alone, and not for this one
    assert "then" not in MemoryPlan(TRAINER, SAMPLER, free=80 * GIB).describe()


def test_refusal_lists_what_lowers_the_fullest_moment():
    plan = MemoryPlan(TRAINER, SAMPLER, free=80 * GIB)
    with pytest.raises(ValueError, match=r"needs 127\.0 GiB") as error:
        plan.check()
    assert "lower activations" in str(error.value)
    assert "set the engine's sleep_level" in str(error.value)
    with pytest.raises(ValueError, match=r"needs 102\.0 GiB") as error:
        replace(plan, apart=True).check()
    text = str(error.value)
    assert "lower activations" not in text  # they are not there while the sampler works
    assert "offload_while_sampling=['optimizer', 'gradients', 'parameters']), which lacks optimizer, gradients" in text
    replace(plan, apart=True, offloads=("optimizer",), free=90 * GIB).check()  # 87 while the trainer computes
    with pytest.raises(ValueError, match=r"needs 87\.0 GiB") as error:
        replace(plan, apart=True, offloads=("optimizer",)).check()
    assert "offload_while_sampling" not in str(error.value)  # it would not help


def test_refusal_of_a_gpu_without_a_trainer_names_it_and_asks_nothing_of_trainers():
    plan = MemoryPlan((), SAMPLER, free=20 * GIB, gpu="a GPU (number 2, the sampler's)")
    for apart in (False, True):
        with pytest.raises(ValueError, match=r"a GPU \(number 2, the sampler's\) that has 20\.0 GiB free") as error:
            replace(plan, apart=apart).check()
        assert "sleep_level" not in str(error.value)
        assert "offload_while_sampling" not in str(error.value)


def test_a_sampler_that_works_alone_need_not_leave_what_the_trainer_leaves():
    plan = MemoryPlan(TRAINER, SAMPLER, free=90 * GIB, apart=True, offloads=("optimizer", "gradients", "parameters"))
    assert totals(plan)[COMPUTING] == 87  # 86 of the trainer, and the sampler's process
    assert not plan.leaves(0.95)
    assert plan.leaves(0.97)
    large = replace(plan, sampler=(PROCESS, replace(CACHE, size=88 * GIB, pushed=0)), trainer=TRAINER[:3])
    assert totals(large)[SAMPLING] == 90
    assert large.leaves(0.95)
    assert not replace(large, free=89 * GIB).leaves(1.0)
