"""Recorded rollouts: written, read back with the line of whatever is wrong, and replayed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron_rl.rollout.protocol import GenerationRequest, SamplingParams
from lightning_megatron_rl.rollout.record import Origin, RecordedRun, read_first_step, record_line
from lightning_megatron_rl.rollout.replay import RecordedReward, ReplayEngine
from lightning_megatron_rl.sample import Outcome, Prompt, Sample, Turn
from lightning_megatron_rl.weights.source import source_of


def samples() -> list[Sample]:
    first = Prompt(token_ids=[1, 2, 3], text="abc", answer="7", index=4)
    second = Prompt(token_ids=[5], text="e", index=9, dataset="other")
    return [
        Sample(first, [7, 8], [-0.1, -0.2], "gh", "stop", 3, {"exact": 1.0}, 0.5, 0.1),
        Sample(first, [9], [-0.3], "i", "length", 3, {"exact": 0.0}, -0.5, -0.1),
        Sample(second, [], [], "", "stop", 3, {}, 1.0),
        Sample(
            second,
            [7, 8, 9],
            [-0.1, 0.0, -0.2],
            "ghi",
            "length",
            3,
            {"environment": 1.5},
            1.5,
            turns=[Turn(0, 1, "g", 0.5), Turn(2, 3, "i")],
            outcome=Outcome("length", 1.0, success=True),
        ),
    ]


def record(**changes: Any) -> str:
    row = {**json.loads(record_line(samples()[0], 1)), **changes}
    return json.dumps({key: value for key, value in row.items() if value is not ...})


def test_what_is_written_is_read_back(tmp_path: Path):
    file = tmp_path / "rollouts.jsonl"
    later = [record_line(sample, 3) for sample in samples()]
    file.write_text("".join([record_line(sample, 2) for sample in samples()] + ["\n"] + later))
    assert read_first_step(file) == samples()


def test_versions_of_a_response_are_read_back(tmp_path: Path):
    file, prompt = tmp_path / "rollouts.jsonl", Prompt(token_ids=[1], text="a")
    sample = Sample(prompt, [7, 8, 9], [-0.1, -0.2, -0.3], "ghi", "stop", 3, segments=[(3, 1), (5, 2)])
    file.write_text(record_line(sample, 6))
    assert read_first_step(file) == [sample]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: not valid JSON"),
        ("[]", r"line 2: list where an object"),
        (record(prompt_ids=...), r"line 2: no prompt_ids; there are step, .*Record the rollout with"),
        (record(response_logprobs=..., reward=...), r"line 2: no response_logprobs, reward"),
        (record(response_ids=[1.5, 2]), r"line 2: response_ids is not a list of token ids: \[1.5, 2\]"),
        (record(prompt_ids="abc"), r"line 2: prompt_ids is not a list of token ids: abc"),
        (record(response_ids=[1, 2, 3]), r"line 2: 3 response_ids, but 2 response_logprobs"),
        (record(reward=None), r"line 2: reward is None, not a number"),
        (record(prompt_ids=[]), r"line 2: prompt_ids is empty"),
        (record(turns=[{"start": 0}]), r"line 2: turns is not a list of turns that follow each other: .*stop"),
        (record(turns=[{"start": 0, "stop": 3}]), r"line 2: turns .* at \[0, 3\] of 2 tokens"),
        (record(turns=[{"start": 1, "stop": 2}, {"start": 0, "stop": 1}]), r"line 2: turns .* at \[1, 2, 0, 1\]"),
        (record(turns=5), r"line 2: turns is not a list"),
        (record(segments=[[3, 1]]), r"line 2: segments is not a list of versions .*: \[1\] tokens of 2"),
        (record(segments=5), r"line 2: segments is not a list of versions with their tokens"),
        (record(outcome={"why": "done"}), r"line 2: outcome is not that of an episode"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str, message: str):
    file = tmp_path / "rollouts.jsonl"
    file.write_text(f"{record()}\n{line}\n")
    with pytest.raises(ValueError, match=message):
        read_first_step(file)


def test_missing_and_empty_files_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"none.jsonl: no such file. RolloutSamples writes"):
        read_first_step(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        read_first_step(tmp_path / "empty.jsonl")


def test_engine_answers_with_what_was_recorded():
    engine = ReplayEngine(samples())
    assert engine.max_model_len == 5
    engine.update_weights(source_of(iter([("w", torch.ones(1))])), version=2)
    assert engine.weight_version == 2
    requests = [
        GenerationRequest([5], seed=1, num_generations=2),
        GenerationRequest([1, 2, 3], seed=1, num_generations=2),
    ]
    answers = engine.generate(requests, SamplingParams())
    assert [[generation.token_ids for generation in group] for group in answers] == [[[], [7, 8, 9]], [[7, 8], [9]]]
    assert answers[0][1].turns == tuple(samples()[3].turns)
    assert answers[0][1].outcome == samples()[3].outcome
    assert answers[1][1].finish_reason == "length"
    with pytest.raises(
        ValueError, match=r"request 0: 3 responses asked for, 2 were recorded for the prompt \[1, 2, 3\]"
    ):
        engine.generate([GenerationRequest([1, 2, 3], seed=1, num_generations=3)], SamplingParams())
    with pytest.raises(ValueError, match=r"request 0: 1 responses asked for, 0 were recorded"):
        engine.generate([GenerationRequest([4], seed=1)], SamplingParams())


def test_update_runs_through_the_weights():
    """Their export is a collective: an engine that left it early would leave the other ranks waiting."""
    weights = iter([("a", torch.ones(1)), ("b", torch.ones(1))])
    ReplayEngine(samples()).update_weights(source_of(weights), version=1)
    assert next(weights, None) is None


def test_rewards_are_those_of_the_record():
    assert RecordedReward(samples())(list(reversed(samples()))) == [1.5, 1.0, -0.5, 0.5]


ORIGIN = Origin("a" * 64, 7)


def record_run(path: Path, origin: Origin = ORIGIN, steps: tuple[int, ...] = (1, 2)) -> Path:
    path.write_text("".join(record_line(sample, step, "run", origin) for step in steps for sample in samples()))
    return path


def test_a_recorded_run_is_read_step_by_step(tmp_path: Path):
    """Each replica has a file; the samples of a prompt share it."""
    first = record_run(tmp_path / "rollouts-dp0.jsonl")
    record_run(tmp_path / "rollouts-dp1.jsonl", steps=(3,))
    run = RecordedRun(first, 0, ORIGIN)
    assert run.samples(2, 4) == run.samples(1, 4) == samples()
    one, other, *_ = run.samples(1, 4)
    assert one.prompt is other.prompt
    assert RecordedRun(first, 1, ORIGIN).samples(3, 4) == samples()
    engine = ReplayEngine(path=str(first))
    engine.open_run(0, ORIGIN)
    assert engine.rollout(1, 4) == samples()


@pytest.mark.parametrize(
    ("origin", "replica", "message"),
    [
        (Origin("b" * 64, 7), 0, "is of a model with the fingerprint aaaaaaaaaaaa, this run's has bbbbbbbbbbbb"),
        (Origin("a" * 64, 8), 0, "is of a run with seed 7, this run has 8: set seed_everything to 7"),
        (ORIGIN, 1, r"rollouts-dp1.jsonl: no such file of replica 1"),
    ],
)
def test_a_record_of_another_start_is_refused(tmp_path: Path, origin: Origin, replica: int, message: str):
    with pytest.raises(ValueError, match=message):
        RecordedRun(record_run(tmp_path / "rollouts-dp0.jsonl"), replica, origin)


def test_what_a_record_does_not_have_is_refused(tmp_path: Path):
    run = RecordedRun(record_run(tmp_path / "rollouts-dp0.jsonl"), 0, ORIGIN)
    with pytest.raises(ValueError, match="no rollout of step 3, it has those of steps 1 to 2: set max_steps"):
        run.samples(3, 4)
    with pytest.raises(ValueError, match="has 4 samples of step 2, this run trains on 8"):
        run.samples(2, 8)
    with pytest.raises(ValueError, match="does not say which model it is of"):
        RecordedRun(record_run(tmp_path / "old.jsonl", Origin()), 0, ORIGIN)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="is empty"):
        RecordedRun(tmp_path / "empty.jsonl", 0, ORIGIN)
    with pytest.raises(ValueError, match="either samples or path"):
        ReplayEngine(samples(), path="x")
    with pytest.raises(ValueError, match="leave validation out"):
        ReplayEngine(path="x").generate([], SamplingParams())
