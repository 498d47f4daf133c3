"""What is seen of a run, in real fits with vLLM: shares of idle time that agree with the timeline, counts, rates."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_megatron_rl.callbacks.timeline import Timeline
from lightning_megatron_rl.callbacks.trace_events import FIRST_SAMPLER
from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.modules.streaming import StreamingSettings
from lightning_megatron_rl.rollout import SamplingParams, VLLMEngine
from lightning_megatron_rl.rollout.streaming import BESIDE_S, POLL_S
from tests.callbacks.test_trace_events import check_format, check_rows, spans
from tests.modules.runs import fit_grpo, length
from tests.modules.test_streaming import ALONE, BATCH, ROWS, write_rows
from tests.training import Run

STEPS = ROWS // BATCH
IDLE = ("perf/trainer_idle_frac", "perf/sampler_idle_frac")
ENDED = ("ready", "under_way", "oldest_age", "length_selection")


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("seen") / "rows.jsonl")


class Tokens(pl.Callback):
    """Tokens that each step is trained on."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.steps.append(sum(len(sample.response_ids) for sample in module.last_rollout.samples))


def fit(
    model: Path, rows: Path, timeline: Path, strategy: dict[str, Any], world_size: int, settings: dict[str, Any]
) -> Run:
    """A GRPO run with a timeline, streaming as `settings` say."""
    engine, tokens = VLLMEngine(max_model_len=64, kv_cache_memory_gb=0.25, num_threads=1), Tokens()
    try:
        run = fit_grpo(
            model,
            strategy,
            world_size,
            steps=STEPS,
            module={
                "engine": engine,
                "streaming": StreamingSettings(**settings),
                "sampling": SamplingParams(max_tokens=40),
                "updates_per_rollout": 1,
            },
            loss={"correction": "tis"},
            rewards=[length],
            callbacks=[Timeline(str(timeline)), tokens],
            trainer={"max_epochs": 1},
            data=PromptDataModule(str(rows), str(model), batch_size=BATCH),
        )
    finally:
        engine.close()
    run.weights, run.extra = {}, {"tokens": tokens.steps}
    return run


def seconds(events: list[dict[str, Any]], name: str, began: float, ended: float) -> float:
    """Busy seconds of a row between two times, by the spans of one name; times in microseconds."""
    found = 0.0
    for event in events:
        inside = min(event["ts"] + event["dur"], ended) - max(event["ts"], began)
        if event["name"] == name and inside > 0:
            found += inside / event["dur"] * event["args"].get("busy_s", event["dur"] / 1e6)
    return found


def check_seen(run: Run, content: dict[str, Any], lag: float) -> None:
    """Metrics of a rank's run against the timeline of its replica.

    Args:
        run: Of rank 0.
        content: Of the file.
        lag: Seconds at the end of a step of which a sampler may not have told yet.
    """
    check_format(content)
    check_rows(content)
    phases, sampler, steps = spans(content, 1), spans(content, FIRST_SAMPLER), spans(content, 1, tid=2)
    assert len(steps) == len(run.steps) == STEPS
    for step, metrics in zip(steps, run.steps, strict=True):
        began, ended = step["ts"], step["ts"] + step["dur"]
        if step["name"] == "step 1":
            # its clock starts with the first weight sync, when the sampler is there
            began = next(event["ts"] for event in phases if event["name"] == "weight_sync")
        length_s = (ended - began) / 1e6
        # the step's own clock stops behind the callbacks' and leaves out what they do: some ms, more on a busy machine
        tolerance = 0.02 + 0.02 / length_s
        for name in IDLE:
            assert 0 <= metrics[name] <= 1
        waited = seconds(phases, "rollout", began, ended) / length_s
        assert metrics["perf/trainer_idle_frac"] == pytest.approx(waited, abs=tolerance)
        idle = 1 - seconds(sampler, "sampling", began, ended) / length_s
        assert metrics["perf/sampler_idle_frac"] == pytest.approx(idle, abs=tolerance + lag / length_s)


@pytest.mark.slow
def test_a_synchronous_run_is_idle_by_turns(worker_pool, qwen3_dir, rows, tmp_path):
    """The trainer waits while its sampler works, and nothing is sampled that is not trained on."""
    path = tmp_path / "timeline.json"
    run = worker_pool.run(fit, qwen3_dir, rows, path, {}, 1, {}, world_size=1, **ALONE)[0]
    content = json.loads(path.read_text())
    check_seen(run, content, lag=0.0)
    work = spans(content, FIRST_SAMPLER)
    drawn = [event["args"]["tokens"] for event in work if event["name"] == "sampling"]
    assert drawn == run.extra["tokens"]
    assert sum(event["name"] == "update" for event in work) == STEPS
    for metrics, tokens in zip(run.steps, drawn, strict=True):
        assert "rollout/ready" not in metrics
        rate = tokens / metrics["time/step_s"]
        assert metrics["perf/sampler_tokens_per_s"] == pytest.approx(rate, rel=0.1)  # by two readings of the clock
        # what its process does not sample of a rollout is the way there and back
        assert metrics["perf/trainer_idle_frac"] + metrics["perf/sampler_idle_frac"] >= 1 - 0.02


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["shared", "separate"])
def test_a_stream_is_seen(worker_pool, qwen3_dir, rows, tmp_path, placement):
    lag = BESIDE_S + 2 * POLL_S if placement == "separate" else 0.0
    path, settings = tmp_path / "timeline.json", {"max_staleness": 2, "placement": placement}
    run = worker_pool.run(fit, qwen3_dir, rows, path, {}, 1, settings, world_size=1, **ALONE)[0]
    content = json.loads(path.read_text())
    check_seen(run, content, lag)
    for metrics in run.steps:
        left = metrics["rollout/ready"] + metrics["rollout/under_way"]
        assert left == int(left)
        assert 0 <= left <= 2 * BATCH  # what the bound allows, without the batch
        assert 0 <= metrics["rollout/oldest_age"] <= 2
        assert metrics["rollout/dropped"] == 0
    assert max(metrics["rollout/ready"] for metrics in run.steps) > 0
    assert [run.steps[-1][f"rollout/{name}"] for name in ENDED] == [0, 0, 0, 0]
    assert sum(event["args"].get("tokens", 0) for event in spans(content, FIRST_SAMPLER)) == sum(run.extra["tokens"])
    assert len(spans(content, 1, tid=3)) == ROWS  # each group was rewarded once
    groups = [event["args"] for event in content["traceEvents"] if event["ph"] == "C"]
    assert max(counts["under way"] for counts in groups) == 3 * BATCH
    assert groups[-1] == {"ready": 0, "under way": 0}
    work = spans(content, FIRST_SAMPLER)
    trained = [event for event in spans(content, 1) if event["name"] in ("ref_logp", "update")]
    overlap = sum(seconds(work, "sampling", event["ts"], event["ts"] + event["dur"]) for event in trained)
    assert (overlap > 0) == (placement == "separate")


@pytest.mark.slow
def test_replicas_are_rows_of_one_file_and_counted_together(worker_pool, qwen3_dir, rows, tmp_path):
    path = tmp_path / "timeline.json"
    runs = worker_pool.run(fit, qwen3_dir, rows, path, {}, 2, {"max_staleness": 1}, world_size=2, **ALONE)
    content = json.loads(path.read_text())
    check_format(content)
    check_rows(content)
    for row in (1, 2, FIRST_SAMPLER, FIRST_SAMPLER + 1):
        assert {"update"} <= {event["name"] for event in spans(content, row)}
    for first, second in zip(runs[0].steps, runs[1].steps, strict=True):
        for name in (*IDLE, "rollout/ready", "rollout/under_way", "rollout/oldest_age", "perf/sampler_tokens_per_s"):
            assert first[name] == second[name]
        assert first["rollout/ready"] + first["rollout/under_way"] <= BATCH
    # two batches were begun at once and one was taken: half of what is left is the other replica's
    assert runs[0].steps[0]["rollout/ready"] + runs[0].steps[0]["rollout/under_way"] == BATCH


@pytest.mark.slow
def test_ranks_of_a_replica_have_one_sampler(worker_pool, qwen3_dir, rows, tmp_path):
    path, strategy = tmp_path / "timeline.json", {"tensor_model_parallel_size": 2}
    runs = worker_pool.run(fit, qwen3_dir, rows, path, strategy, 2, {"max_staleness": 1}, world_size=2, **ALONE)
    content = json.loads(path.read_text())
    check_format(content)
    named = {event["args"]["name"] for event in content["traceEvents"] if event["name"] == "process_name"}
    assert named == {"trainer rank 0", "trainer rank 1", "sampler of rank 0"}
    assert [step["rollout/under_way"] for step in runs[0].steps] == [
        step["rollout/under_way"] for step in runs[1].steps
    ]
    assert sum(step["perf/sampler_tokens_per_s"] for step in runs[1].steps) > 0
