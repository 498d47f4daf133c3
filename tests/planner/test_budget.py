"""What `auto` chooses: among which settings, which of them, and what a measured step says of the rest."""

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_megatron_rl.data.planning import plan_microbatches, round_up
from lightning_megatron_rl.modules.planning import Lengths, longest_sequence
from lightning_megatron_rl.modules.sharing import microbatch_rules
from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.plan.config import FromConfig
from lightning_megatron_rl.planner.budget import (
    EQUAL,
    MARGIN,
    SLOW_HOST,
    candidates,
    choose,
    expected_peak,
    fastest,
    fits,
    leaves_room,
)
from lightning_megatron_rl.planner.divisibility import PipelineSplit
from lightning_megatron_rl.planner.hardware import HARDWARE
from lightning_megatron_rl.planner.moments import GIB, MemoryPlan, Part
from lightning_megatron_rl.planner.run import Run
from tests.command_line import ROOT


@pytest.fixture(scope="module")
def run() -> Run:
    """Eight H100s, of which two hold a replica of 8B; sequences of 4,352 tokens."""
    config: Path = ROOT / "configs" / "recipes" / "qwen3-8b" / "grpo.yaml"
    return FromConfig(["--config", str(config)]).describe(HARDWARE["h100"], devices=8, nodes=1, lengths=Lengths())


def test_candidates_hold_the_longest_sequence_and_end_where_all_are_in_one(run: Run):
    found = list(candidates(run, tokens=True, recompute=True, least=5000))
    assert [candidate.microbatch_tokens for candidate in found[:3]] == [5000, 5120, 6144]
    assert [candidate.recompute for candidate in found] == sorted(candidate.recompute for candidate in found)
    kept = [candidate for candidate in found if not candidate.recompute]
    assert [candidate.microbatches == 1 for candidate in kept[:-1]] == [False] * (len(kept) - 1)
    layout = replace(run.layout, tensor_model_parallel_size=1, sequence_parallel=False, context_parallel_size=2)
    two_ranks = replace(run, layout=layout)
    assert next(candidates(two_ranks, tokens=True, recompute=False, least=5000)).microbatch_tokens == 5000


@pytest.mark.parametrize("context", [1, 4])
def test_context_parallelism_divides_what_a_sequence_takes(context: int):
    """TP 2 and CP 4 pad a row to a multiple of 16: a micro-batch of that holds it, and each rank has a quarter."""
    length = 32_769
    config = ROOT / "configs" / "recipes" / "qwen3-8b" / "sft.yaml"
    layout = f"--trainer.strategy.context_parallel_size={context}"
    built = FromConfig(["--config", str(config), f"--data.max_length={length}", "--data.batch_size=8", layout])
    least = longest_sequence(built.model, built.datamodule, built.strategy.layout)
    rules = microbatch_rules(built.strategy.layout)
    assert least == round_up(length, 2 if context == 1 else 16)
    assert plan_microbatches([length], least, rules=rules) == [[0]]
    found = built.describe(HARDWARE["h100"], devices=8, nodes=1, lengths=Lengths())
    assert found.microbatch_tokens == least
    assert found.recompute_setting == ("full" if context == 1 else "none")


def test_what_is_not_open_stays(run: Run):
    assert {found.recompute for found in candidates(run, tokens=True, recompute=False, least=1)} == {run.recompute}
    assert {found.microbatch_tokens for found in candidates(run, tokens=False, recompute=True, least=1)} == {
        run.microbatch_tokens
    }


def test_choice_is_the_fastest_of_those_that_fit(run: Run):
    found = choose(run, tokens=True, recompute=True, least=4352)
    every = list(candidates(run, tokens=True, recompute=True, least=4352))
    fitting = [candidate for candidate in every if candidate.memory().needed <= MARGIN * candidate.kind.free]
    assert 0 < len(fitting) < len(every)
    assert found in fitting
    assert all(found.step_seconds <= EQUAL * candidate.step_seconds for candidate in fitting)
    assert not found.recompute  # which costs a forward pass
    small = replace(run, kind=replace(run.kind, memory_gib=run.kind.memory_gib / 10))
    nothing = choose(small, tokens=True, recompute=True, least=4352)
    others = candidates(small, tokens=True, recompute=True, least=4352)
    assert nothing.memory().needed == min(candidate.memory().needed for candidate in others)
    assert not nothing.fits


def test_of_equals_the_smaller_is_taken(run: Run):
    twice = replace(run, microbatch_tokens=1_000_000)
    thrice = replace(run, microbatch_tokens=1_500_000)
    assert twice.step_seconds == thrice.step_seconds  # one micro-batch holds everything
    assert fastest([thrice, twice]) is twice


def mixture_on(world: int, layout: ParallelLayout, *, sequences: int, layers: int = 48) -> Run:
    """The first layers of 30B-A3B with Adam's moments in bf16 on H200s; sequences of 539 tokens."""
    config = ROOT / "configs" / "recipes" / "qwen3-30b-a3b" / "sft.yaml"
    found = FromConfig(["--config", str(config)]).describe(HARDWARE["h200"], devices=8, nodes=1, lengths=Lengths())
    part = {name: getattr(found.size, name) * layers // 48 for name in ("dense", "experts", "experts_met", "layers")}
    return replace(
        found,
        size=replace(found.size, **part),
        world=world,
        layout=layout,
        pipeline_split=PipelineSplit(),
        state=replace(found.state, optimizer=6),
        work=replace(found.work, sequences=sequences, tokens=539, longest=539),
    )


def test_micro_batches_are_as_large_as_experts_need(run: Run):
    """Ten layers of 30B-A3B on an H200: 1,017 tokens, as was chosen once, take fifteen times as long."""
    mixture = mixture_on(1, ParallelLayout(), sequences=128, layers=10)
    small = replace(mixture, microbatch_tokens=1017, recompute=False)
    found = choose(mixture, tokens=True, recompute=True, least=1017)
    assert found.microbatch_tokens >= 32_768
    assert not found.recompute
    assert small.step_seconds > 10 * found.step_seconds


def test_some_layers_are_recomputed_where_that_fills_the_memory():
    """30B-A3B on eight GPUs: small micro-batches take long, and large ones fit with some layers recomputed."""
    layout = ParallelLayout(expert_model_parallel_size=8, expert_tensor_parallel_size=1)
    run = mixture_on(8, layout, sequences=256)
    every = list(candidates(run, tokens=True, recompute=True, least=1017))
    found = choose(run, tokens=True, recompute=True, least=1017)
    assert found.recompute_setting in range(1, found.chunk_layers)
    assert found.recompute * found.chunk_layers == found.recompute_setting
    all_or_nothing = [candidate for candidate in every if candidate.recompute in (0, 1) and fits(candidate.memory())]
    assert found.step_seconds < min(candidate.step_seconds for candidate in all_or_nothing)
    less, more = (replace(found, recompute=share) for share in (0.0, 1.0))
    assert less.step_seconds < found.step_seconds < more.step_seconds
    assert less.memory().needed > found.memory().needed > more.memory().needed


def test_some_layers_are_not_recomputed_for_a_small_gain():
    """30B-A3B on four GPUs: it would take 3 % less, and the first step might not leave the room that it needs."""
    layout = ParallelLayout(expert_model_parallel_size=4, expert_tensor_parallel_size=1)
    run = mixture_on(4, layout, sequences=256)
    every = candidates(run, tokens=True, recompute=True, least=1017)
    least = min(candidate.step_seconds for candidate in every if fits(candidate.memory()))
    found = choose(run, tokens=True, recompute=True, least=1017)
    assert (found.recompute_setting, found.microbatches) == ("full", 1)
    assert 0.95 * found.step_seconds < least < 0.98 * found.step_seconds


def test_launches_count_as_on_a_slow_host():
    """24 layers of 30B-A3B on two GPUs: small micro-batches gain little on a fast host, and lose on a slow one."""
    layout = ParallelLayout(expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    run = mixture_on(2, layout, sequences=256, layers=24)
    found = choose(run, tokens=True, recompute=True, least=1017)
    assert (found.recompute_setting, found.microbatches) == ("full", 1)
    assert found.launch_factor == 1  # what is told are the seconds of the others
    small = replace(found, microbatch_tokens=16_384, recompute=0.375)
    assert small.step_seconds < 1.1 * found.step_seconds
    slow = [replace(run, launch_factor=SLOW_HOST).step_seconds for run in (small, found)]
    assert slow[0] > 1.25 * slow[1]


def test_no_part_is_recomputed_without_a_first_step_to_measure(run: Run):
    """Half of the tokens hold the longest sequence, and the tokens are left to the planner."""
    parts = [one for one in candidates(run, tokens=True, recompute=True, least=4352) if 0 < one.recompute < 1]
    assert min(candidate.microbatch_tokens for candidate in parts) >= 2 * 4352
    fixed = candidates(run, tokens=False, recompute=True, least=4352)
    assert [candidate.recompute_setting for candidate in fixed] == ["none", "full"]


def plan(activations: float) -> MemoryPlan:
    parts = {"trainer: weights": 10, "trainer: activations": activations}
    return MemoryPlan(tuple(Part(name, size * GIB, "", "") for name, size in parts.items()), (), free=20 * GIB)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (14, 18),  # as planned
        (15, 20),  # activations took 5 for 4: 10 + 8 * 5 / 4
        (12, 18),  # less than planned is not counted on
        (30, 50),  # 10 + 8 * 20 / 4
    ],
)
def test_what_was_measured_corrects_the_plan(measured: float, expected: float):
    assert expected_peak(measured * GIB, plan(4), plan(8)) == pytest.approx(expected * GIB)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (14, 18),  # as planned
        (15, 20),  # activations took 5 for 4
        (12, 16),  # less than planned: 12 + 4
    ],
)
def test_a_step_with_everything_corrects_the_plan_both_ways(measured: float, expected: float):
    assert expected_peak(measured * GIB, plan(4), plan(8), whole=True) == pytest.approx(expected * GIB)


@pytest.mark.parametrize("whole", [False, True])
def test_what_torch_does_not_see_is_not_compared_with_what_it_measured(whole: bool):
    tried, wanted = (with_process(plan(activations)) for activations in (4, 8))
    assert expected_peak(15 * GIB, tried, wanted, whole=whole) == pytest.approx(20 * GIB)


def with_process(alone: MemoryPlan) -> MemoryPlan:
    return replace(alone, trainer=(*alone.trainer, Part("trainer: process", 3 * GIB, "", "")))


def test_a_choice_leaves_a_margin():
    assert fits(plan(9))  # 19 of 20: the margin is 5 %
    assert not fits(plan(9.01))


def test_as_much_is_taken_as_leaves_room():
    """Measured 15 for 14: activations take 5/4 of the plan. Of 20, 19 may be used: 7.2 of activations."""
    answers = [leaves_room(15 * GIB, plan(4), plan(more), 20 * GIB) for more in (8, 7.3, 7.2, 6)]
    assert answers == [False, False, True, True]
