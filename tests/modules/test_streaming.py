"""Streams of rollouts in real fits: a bound that holds, every prompt once, checkpoints that lose nothing."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.environments.base import EpisodeSettings
from lightning_megatron_rl.modules.dynamic_sampling import DynamicSampling
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.ppo import PPOModule
from lightning_megatron_rl.modules.streaming import STATE, StreamingSettings
from lightning_megatron_rl.rollout import SamplingParams, VLLMEngine
from lightning_megatron_rl.rollout.replay import ReplayEngine
from lightning_megatron_rl.verify.pool import WorkerError
from tests.modules.runs import fit_grpo, length, recorded_samples
from tests.training import Run

BATCH, ROWS = 4, 24


def write_rows(path: Path, count: int = ROWS) -> Path:
    letters = "abcdefghijklmnopqrstuvwxyz"
    rows = [{"prompt": letters[row % 26] * (2 + row % 9), "answer": "7"} for row in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Used(pl.Callback):
    """Which rows each step is trained on, and how old their tokens are; stops where it is told to."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.rows: list[list[int]] = []
        self.ages: list[int] = []
        self.segments: list[int] = []
        self.saved: list[Any] = []  # of the streams, by a checkpoint before the first step and one after the last
        self.stop_after = stop_after

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        checkpoint: dict[str, Any] = {}
        module.on_save_checkpoint(checkpoint)
        self.saved.append(checkpoint.get(STATE))

    on_train_end = on_train_start

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        samples = module.last_rollout.samples
        self.rows.append([sample.prompt.index for sample in samples[:: module.num_generations]])
        step = trainer.global_step - 1
        self.ages.append(max(step - sample.weight_version for sample in samples))
        self.segments += [len(sample.segments) for sample in samples]
        if len(self.rows) == self.stop_after:
            trainer.should_stop = True


def fit_stream(
    model: Path,
    rows: Path,
    strategy: dict[str, Any],
    world_size: int,
    settings: dict[str, Any],
    *,
    steps: int = ROWS // BATCH,
    engine: dict[str, Any] | None = None,
    save_to: Path | None = None,
    stop_after: int | None = None,
    ckpt_path: Path | None = None,
    trainer: dict[str, Any] | None = None,
    val: bool = False,
) -> Run:
    used = Used(stop_after)
    callbacks: list[pl.Callback] = [used]
    if save_to is not None:
        callbacks.append(pl.callbacks.ModelCheckpoint(save_to, every_n_train_steps=1, save_top_k=-1, filename="{step}"))
    vllm = VLLMEngine(max_model_len=64, kv_cache_memory_gb=0.25, num_threads=1, **(engine or {}))
    sets = {"val": {"same": str(rows)}, "val_batch_size": ROWS} if val else {}
    try:
        run = fit_grpo(
            model,
            strategy,
            world_size,
            steps=steps,
            module={
                "engine": vllm,
                "streaming": StreamingSettings(**settings),
                "sampling": SamplingParams(max_tokens=40),
                "updates_per_rollout": 1,
            },
            loss={"correction": "tis"},
            rewards=[length],
            callbacks=callbacks,
            trainer={"enable_checkpointing": save_to is not None, "logger": False, "max_epochs": 1, **(trainer or {})},
            data=PromptDataModule(str(rows), str(model), batch_size=BATCH, **sets),
            ckpt_path=ckpt_path,
        )
    finally:
        vllm.close()  # a module keeps its engine for the next run
    run.extra |= {"rows": used.rows, "ages": used.ages, "segments": used.segments, "saved": used.saved}
    run.weights = {}
    return run


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("stream") / "rows.jsonl")


ALONE = {"init_process_group": False, "timeout": 240.0}


def check(runs: list[Run], max_staleness: int) -> None:
    """Each row of the epoch in exactly one step of one replica; no token older than the bound, some older than none."""
    used = [row for run in runs for step in run.extra["rows"] for row in step]
    assert sorted(used) == list(range(ROWS))
    for run in runs:
        assert len(run.extra["rows"]) == ROWS // BATCH
        assert max(run.extra["ages"]) <= max_staleness
        assert run.extra["ages"][0] == 0
        assert [step["rollout/staleness_max"] for step in run.steps] == [
            max(ages) for ages in zip(*(other.extra["ages"] for other in runs), strict=True)
        ]
    assert max(age for run in runs for age in run.extra["ages"]) >= 1


@pytest.mark.parametrize(
    ("placement", "on_update"), [("separate", "recomputed"), ("shared", "finished"), ("separate", "kept")]
)
def test_bound_holds_and_every_prompt_is_used_once(worker_pool, qwen3_dir, rows, placement, on_update):
    settings = {"max_staleness": 2, "placement": placement, "on_update": on_update}
    run = worker_pool.run(fit_stream, qwen3_dir, rows, {}, 1, settings, world_size=1, **ALONE)[0]
    check([run], 2)
    if on_update == "finished":
        assert max(run.extra["segments"]) == 1


def test_each_replica_has_a_stream_of_its_own(worker_pool, qwen3_dir, rows):
    settings = {"max_staleness": 1}
    runs = worker_pool.run(fit_stream, qwen3_dir, rows, {}, 2, settings, world_size=2, **ALONE)
    check(runs, 1)


def test_ranks_of_a_replica_train_on_one_stream(worker_pool, qwen3_dir, rows):
    strategy = {"tensor_model_parallel_size": 2}
    runs = worker_pool.run(fit_stream, qwen3_dir, rows, strategy, 2, {"max_staleness": 1}, world_size=2, **ALONE)
    assert runs[0].extra["rows"] == runs[1].extra["rows"]
    check(runs[:1], 1)


def test_a_sampler_that_sleeps_goes_on_with_what_was_put_away(worker_pool, qwen3_dir, rows):
    options = {"engine": {"sleep_level": 1}}
    run = worker_pool.run(fit_stream, qwen3_dir, rows, {}, 1, {"max_staleness": 2}, world_size=1, **options, **ALONE)[0]
    check([run], 2)


def test_validation_goes_between(worker_pool, qwen3_dir, rows):
    """Training requests are held while the validation set is sampled."""
    options = {"trainer": {"val_check_interval": 2}, "val": True}
    settings = {"max_staleness": 2, "placement": "separate"}
    run = worker_pool.run(fit_stream, qwen3_dir, rows, {}, 1, settings, world_size=1, **options, **ALONE)[0]
    check([run], 2)
    assert "val/same/mean_at_1" in run.steps[-1]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_checkpoint_loses_no_prompt_and_repeats_none(worker_pool, qwen3_dir, rows, tmp_path, before, after):
    """Also where the number of replicas changes."""
    settings = {"max_staleness": 2}
    first = worker_pool.run(
        fit_stream, qwen3_dir, rows, {}, before, settings, save_to=tmp_path, stop_after=3, world_size=before, **ALONE
    )
    rest = worker_pool.run(
        fit_stream, qwen3_dir, rows, {}, after, settings, ckpt_path=tmp_path / "step=3.ckpt", world_size=after, **ALONE
    )
    used = [row for run in (*first, *rest) for step in run.extra["rows"] for row in step]
    assert [len(run.extra["rows"]) for run in (first[0], rest[0])] == [3, 3]
    assert sorted(used) == list(range(ROWS))
    assert max(age for run in rest for age in run.extra["ages"]) <= 2
    assert len(first[0].extra["saved"][1]) == before
    assert rest[0].extra["saved"][0] == first[0].extra["saved"][1]  # also before anything was sampled again


def test_a_checkpoint_with_a_stream_is_not_resumed_without(worker_pool, qwen3_dir, rows, tmp_path):
    one = {"world_size": 1, **ALONE}
    worker_pool.run(
        fit_stream, qwen3_dir, rows, {}, 1, {"max_staleness": 1}, save_to=tmp_path, stop_after=2, steps=2, **one
    )
    with pytest.raises(WorkerError, match=r"holds a stream of rollouts.*resume with the run's `streaming`"):
        worker_pool.run(fit_stream, qwen3_dir, rows, {}, 1, {}, ckpt_path=tmp_path / "step=2.ckpt", **one)


# ---- refused ---------------------------------------------------------------------------------------------------------


class Setting:
    """An environment that nobody plays."""

    def start(self, prompt: Any, seed: int) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("settings", "module", "message"),
    [
        ({}, {"engine": "replay"}, "max_staleness=1 with engine=ReplayEngine, which samples whole batches"),
        ({}, {"engine": "vllm", "environment": Setting(), "episodes": EpisodeSettings()},
         "max_staleness=1 with environment=Setting, which advances a whole batch"),
        ({}, {"engine": "vllm", "dynamic_sampling": DynamicSampling()}, "max_staleness=1 with dynamic_sampling"),
        ({}, {"engine": "vllm", "sampling": SamplingParams(max_tokens=9, stop=("]",))},
         r"max_staleness=1 with sampling.stop=\['\]'\]"),
        ({"on_update": "kept"}, {"engine": "sleeps"}, "on_update='kept' with engine.sleep_level=1"),
        ({"placement": "separate"}, {"engine": "sleeps"}, "placement='separate' with engine.sleep_level=1"),
        ({"in_flight": 3}, {"engine": "vllm"}, r"streaming.in_flight=3 < data.batch_size=4"),
    ],
)  # fmt: skip
def test_what_cannot_stream_is_refused_before_anything_starts(
    worker_pool, broken_model, qwen3_dir, rows, settings, module, message
):
    with pytest.raises(WorkerError, match=message):
        worker_pool.run(refuse, broken_model, qwen3_dir, rows, settings, module, world_size=1, **ALONE)


def refuse(model: Path, tokenizer: Path, rows: Path, settings: dict[str, Any], module: dict[str, Any]) -> None:
    engines = {
        "vllm": lambda: VLLMEngine(max_model_len=64),
        "sleeps": lambda: VLLMEngine(max_model_len=64, sleep_level=1),
        "replay": lambda: ReplayEngine(recorded_samples()),
    }
    fit_grpo(
        model,
        {},
        1,
        module={
            "updates_per_rollout": 1,
            **module,
            "engine": engines[module["engine"]](),
            "streaming": StreamingSettings(**{"max_staleness": 1, **settings}),
        },
        data=PromptDataModule(str(rows), str(tokenizer), batch_size=BATCH),
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_staleness": -1}, "streaming.max_staleness=-1 must be at least 0"),
        ({"in_flight": 0}, "streaming.in_flight=0 must be at least 1"),
        ({"on_update": "aborted"}, "streaming.on_update='aborted': choose one of finished, recomputed, kept"),
        ({"placement": "elsewhere"}, "streaming.placement='elsewhere': choose one of auto, shared, separate"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        StreamingSettings(**settings)


def test_a_bound_of_zero_is_the_synchronous_run(qwen3_dir):
    for module in (GRPOModule, PPOModule):
        assert module(str(qwen3_dir), [length], streaming=StreamingSettings()).streamed is None
        assert module(str(qwen3_dir), [length], streaming=StreamingSettings(1)).streamed is not None
