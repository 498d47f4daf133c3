"""Streams of rollouts in real fits: a bound that holds, every prompt once, checkpoints that lose nothing."""

import json
import logging
import os
import signal
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.callbacks.rollout_samples import RolloutSamples
from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.environments import Action, Environment, Episode, EpisodeSettings, Reply
from lightning_megatron_rl.modules.dynamic_sampling import DynamicSampling
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.ppo import PPOModule
from lightning_megatron_rl.modules.rollout_batch import Rollout
from lightning_megatron_rl.modules.shaping import OverlongSettings
from lightning_megatron_rl.modules.streaming import STATE, StreamingSettings
from lightning_megatron_rl.planner.moments import GIB, MemoryPlan, Part
from lightning_megatron_rl.rollout import SamplingParams, VLLMEngine
from lightning_megatron_rl.rollout.protocol import WeightsLostError
from lightning_megatron_rl.rollout.replay import ReplayEngine
from lightning_megatron_rl.sample import Prompt, Sample
from lightning_megatron_rl.verify.pool import WorkerError
from tests.modules.kept_engine import kept_engine
from tests.modules.runs import fit_grpo, length, recorded_samples
from tests.selection import by_default
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


class Lines(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


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
    module: dict[str, Any] | None = None,
    record_to: Path | None = None,
    callbacks: list[pl.Callback] | None = None,
    make_module: type[GRPOModule] | None = None,
) -> Run:
    used = Used(stop_after)
    callbacks = [used, *(callbacks or [])]
    log = Lines()
    logging.getLogger("lightning_megatron_rl.modules.streaming").addHandler(log)
    if save_to is not None:
        callbacks.append(pl.callbacks.ModelCheckpoint(save_to, every_n_train_steps=1, save_top_k=-1, filename="{step}"))
    replayed = (engine or {}).get("path")
    vllm: Any = (
        ReplayEngine(path=replayed)
        if replayed
        else kept_engine(**{"max_model_len": 64, "kv_cache_memory_gb": 0.25, "num_threads": 1, **(engine or {})})
    )
    if record_to is not None:
        callbacks.append(RolloutSamples(num_samples=0, dirpath=str(record_to), max_samples_per_step=None))
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
                **(module or {}),
            },
            loss={"correction": "tis"},
            rewards=[length],
            callbacks=callbacks,
            trainer={"enable_checkpointing": save_to is not None, "logger": False, "max_epochs": 1, **(trainer or {})},
            data=PromptDataModule(str(rows), str(model), batch_size=BATCH, **sets),
            ckpt_path=ckpt_path,
            make_module=make_module,
        )
    finally:
        logging.getLogger("lightning_megatron_rl.modules.streaming").removeHandler(log)
    run.extra |= {"rows": used.rows, "ages": used.ages, "segments": used.segments, "saved": used.saved}
    run.extra["log"] = log.lines
    run.extra["checksum"] = {name: sha256(weight.numpy().tobytes()).hexdigest() for name, weight in run.weights.items()}
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


class PutAway(pl.Callback):
    """Whether a validation's weights, which may be an average, came when nothing of the stream was in the engine."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_validation_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if (stream := module.sampler.stream._stream) is not None:
            self.seen.append(stream._is_held and not stream._names)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        assert self.seen
        assert all(self.seen)


@pytest.mark.parametrize(
    "mode", by_default(["separate, recomputed"], ["separate, recomputed", "shared, finished", "separate, kept"])
)
def test_bound_holds_and_every_prompt_is_used_once(worker_pool, qwen3_dir, rows, mode):
    """Training requests are held while a validation set is sampled between two steps."""
    placement, on_update = mode.split(", ")
    settings = {"max_staleness": 2, "placement": placement, "on_update": on_update}
    options = {"trainer": {"val_check_interval": 2}, "val": True, "callbacks": [PutAway()]}
    run = worker_pool.run(fit_stream, qwen3_dir, rows, {}, 1, settings, world_size=1, **options, **ALONE)[0]
    check([run], 2)
    assert "val/same/mean_at_1" in run.steps[-1]
    if on_update == "finished":
        assert max(run.extra["segments"]) == 1


class Pauses(Environment):
    """Two turns; every fifth row takes its time."""

    def start(self, prompt: Any, seed: int) -> Episode:
        return PausesEpisode(0.3 if prompt.index % 5 == 0 else 0.0)


class PausesEpisode(Episode):
    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def step(self, action: Action) -> Reply:
        time.sleep(self.wait_s)
        return Reply(done=True, reward=len(action.token_ids) / 10) if action.number else Reply("ok")


EPISODES = {
    "environment": Pauses(),
    "episodes": EpisodeSettings(max_turns=3, max_turn_tokens=6),
    "rewards": [],
}


def test_episodes_stream(worker_pool, qwen3_dir, rows, tmp_path):
    """Also over a checkpoint, in which no environment's state can be."""
    settings, one = {"max_staleness": 2, "placement": "separate"}, {"world_size": 1, "module": EPISODES, **ALONE}
    (first,) = worker_pool.run(fit_stream, qwen3_dir, rows, {}, 1, settings, save_to=tmp_path, stop_after=3, **one)
    (rest,) = worker_pool.run(fit_stream, qwen3_dir, rows, {}, 1, settings, ckpt_path=tmp_path / "step=3.ckpt", **one)
    used = [row for run in (first, rest) for step in run.extra["rows"] for row in step]
    assert sorted(used) == list(range(ROWS))
    assert max(first.extra["ages"] + rest.extra["ages"]) <= 2
    for step in first.steps + rest.steps:
        assert step["episode/turns_mean"] == 2
        assert step["reward/environment"] > 0
        assert step["rollout/staleness_max"] <= 2


@pytest.mark.slow  # as the first half of a resumed run below
def test_each_replica_has_a_stream_of_its_own(worker_pool, qwen3_dir, rows):
    settings = {"max_staleness": 1}
    runs = worker_pool.run(fit_stream, qwen3_dir, rows, {}, 2, settings, world_size=2, **ALONE)
    check(runs, 1)


class Late(pl.Callback):
    """The second replica begins the second step when the first one has rewarded as many groups as three batches have.

    `complete` is how many groups each of them has sampled to their ends, and not trained on, when that step is over.
    Whether they are ready as well is the scheduler's: the last ones may be in their rewards when the second one comes.
    """

    def __init__(self, rewarded: Path) -> None:
        self.rewarded = rewarded  # a sign for each group of the first replica
        self.complete: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        is_late, patience = (trainer.global_rank, trainer.global_step) == (1, 1), time.monotonic() + 60
        while is_late and len(self.rewarded.read_text()) < 3 * BATCH // 2 and time.monotonic() < patience:
            time.sleep(0.1)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        checkpoint: dict[str, Any] = {}
        module.on_save_checkpoint(checkpoint)
        if trainer.global_step == 2:
            states = [json.loads(state) for state in checkpoint[STATE]]
            self.complete = [sum(map(is_complete, state["groups"])) for state in states]


def is_complete(group: dict[str, Any]) -> bool:
    return all(response["finish_reason"] is not None for response in group["responses"])


def fit_late(rewarded: Path, *arguments: Any, **options: Any) -> Run:
    def reward(samples: list[Sample]) -> list[float]:
        if os.environ["RANK"] == "0":
            with rewarded.open("a") as file:
                file.write("+")
        return length(samples)

    late = Late(rewarded)
    run = fit_stream(*arguments, callbacks=[late], module={"rewards": [reward]}, **options)
    run.extra["complete"] = late.complete
    return run


def test_replicas_that_wait_for_others_sample_on(worker_pool, qwen3_dir, rows, tmp_path):
    """A batch has two groups of each replica, and no more are in flight: those behind them are begun in the wait."""
    settings = {"max_staleness": 2, "in_flight": BATCH}
    (tmp_path / "rewarded").touch()
    arguments = (tmp_path / "rewarded", qwen3_dir, rows, {}, 2, settings)
    runs = worker_pool.run(fit_late, *arguments, world_size=2, **ALONE)
    check(runs, 2)
    assert runs[0].extra["complete"][0] >= BATCH // 2


class LosesWeights(GRPOModule):
    """The first replica's sampler has no weights in the first step, as if a process had ended that had the only ones.

    On a CPU the trainer keeps a copy for that.
    """

    def rollout(self, prompts: list[Prompt]) -> Rollout:
        engine: Any = self.engine
        if self.trainer.global_step == 0 and self.trainer.global_rank == 0:

            def lose(*_: Any, **__: Any) -> None:
                del engine.collect
                raise WeightsLostError("gone")

            engine.collect = lose
        rollout = super().rollout(prompts)
        assert "collect" not in vars(engine), "nothing was lost"
        return rollout


@pytest.mark.slow  # two samplers of a mixture start
def test_weights_that_are_lost_cost_no_replica_its_batch(worker_pool, qwen3_moe_dir, rows):
    """Replicas that share experts push together: those that have batches keep them while another gets its weights."""
    settings = {"max_staleness": 1, "placement": "shared"}
    options = {"make_module": LosesWeights, **ALONE}
    strategy = {"expert_model_parallel_size": 2}
    check(worker_pool.run(fit_stream, qwen3_moe_dir, rows, strategy, 2, settings, world_size=2, **options), 1)


@pytest.mark.parametrize("replicas", by_default(["2 to 1"], ["2 to 1", "1 to 2"]))
def test_a_checkpoint_loses_no_prompt_and_repeats_none(worker_pool, qwen3_dir, rows, tmp_path, replicas):
    """Also where the number of replicas changes."""
    before, after = map(int, replicas.split(" to "))
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


@pytest.mark.slow  # five runs
def test_an_epoch_may_go_on_with_other_bounds(worker_pool, qwen3_dir, rows, tmp_path):
    """0 is no stream at all: prompts that were read ahead are then sampled first, and saved again."""
    parts: list[Run] = []
    for number, (bound, steps) in enumerate([(2, 1), (0, 1), (3, 1), (1, 3)]):
        options: dict[str, Any] = {"save_to": tmp_path, "stop_after": steps}
        if number:
            options["ckpt_path"] = tmp_path / f"step={number}.ckpt"
        settings = {"max_staleness": bound}
        parts += worker_pool.run(fit_stream, qwen3_dir, rows, {}, 1, settings, **options, world_size=1, **ALONE)
        assert len(parts[-1].extra["rows"]) == steps
        assert max(parts[-1].extra["ages"]) <= bound
    assert sorted(row for part in parts for step in part.extra["rows"] for row in step) == list(range(ROWS))


def test_dynamic_sampling_takes_from_the_stream(worker_pool, qwen3_dir, rows):
    """Rows divisible by three get no spread: they make room for others, and hardly any is trained on."""
    module = {"dynamic_sampling": DynamicSampling(max_rounds=4), "rewards": [flat_thirds]}
    settings = {"max_staleness": 1}
    (run,) = worker_pool.run(fit_stream, qwen3_dir, rows, {}, 1, settings, module=module, world_size=1, **ALONE)
    used = [row for step in run.extra["rows"] for row in step]
    assert len(used) == ROWS
    assert not [row for row in used if row % 3 == 0]
    assert all(step["reward/zero_spread_frac"] == 0 for step in run.steps)
    assert sum(step["rollout/refill_groups"] for step in run.steps) >= ROWS // 3
    assert max(run.extra["ages"]) <= 1


def flat_thirds(samples: list[Any]) -> list[float]:
    return [float(place % 2 if sample.prompt.index % 3 else 0) for place, sample in enumerate(samples)]


# ---- replay ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", by_default([2], [1, 2]))
def test_a_replay_makes_the_weights_of_the_run(worker_pool, qwen3_dir, rows, tmp_path, parts):
    """Bit for bit, though what was sampled when depended on the clock; whole batches make the numbers of parts."""
    replicas, settings = 2, {"max_staleness": 2, "placement": "separate", "batch_parts": parts}
    many = {"world_size": replicas, **ALONE}
    recorded = worker_pool.run(fit_stream, qwen3_dir, rows, {}, replicas, settings, record_to=tmp_path, **many)
    check(recorded, 2)
    engine = {"path": str(tmp_path / "rollouts-dp0.jsonl")}
    again = worker_pool.run(fit_stream, qwen3_dir, rows, {}, replicas, settings, engine=engine, **many)
    for run, replay in zip(recorded, again, strict=True):
        assert replay.extra["checksum"] == run.extra["checksum"]
        assert replay.extra["rows"] == run.extra["rows"]
        for name in ("policy/loss", "rollout/staleness_mean", "mismatch/k3", "reward/mean"):
            assert [step[name] for step in replay.steps] == [step[name] for step in run.steps]
    if parts == 1:
        return
    settings = {**settings, "batch_parts": 1}
    (whole, _) = worker_pool.run(fit_stream, qwen3_dir, rows, {}, replicas, settings, engine=engine, **many)
    for mine, theirs in zip(again[0].steps, whole.steps, strict=True):
        assert mine.keys() == theirs.keys()
        for name in ("reward/mean", "rollout/response_len_mean", "rollout/staleness_mean"):
            assert mine[name] == theirs[name]
        for name in ("policy/loss", "policy/grad_norm", "policy/kl_ref", "mismatch/k3"):
            # sums in another order, and weights that grow apart by that over the steps
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-7), name


class LosesItsSampler(GRPOModule):
    """Its sampler dies in the third step, when the first part of the batch has come."""

    def prepare(self, samples: list[Sample], tally: Tally) -> Rollout:
        if self.trainer.global_step == 2 and self.engine.num_restarts == 0:
            assert isinstance(self.engine, VLLMEngine)
            assert self.engine.pid is not None
            os.kill(self.engine.pid, signal.SIGKILL)
        return super().prepare(samples, tally)


@pytest.mark.slow
def test_a_sampler_that_dies_between_two_parts_loses_nothing(worker_pool, qwen3_dir, rows, tmp_path):
    """The next one gets the weights in the middle of an update, whose gradients stay: its replay makes the same."""
    settings = {"max_staleness": 2, "placement": "separate", "batch_parts": 2}
    options = {"engine": {"max_restarts": 1}, "make_module": LosesItsSampler, "record_to": tmp_path}
    (run,) = worker_pool.run(fit_stream, qwen3_dir, rows, {}, 1, settings, world_size=1, **options, **ALONE)
    check([run], 2)
    assert [step["perf/engine_restarts"] for step in run.steps] == [0, 0, 1, 1, 1, 1]
    engine = {"path": str(tmp_path / "rollouts-dp0.jsonl")}
    (again,) = worker_pool.run(fit_stream, qwen3_dir, rows, {}, 1, settings, engine=engine, world_size=1, **ALONE)
    assert again.extra["checksum"] == run.extra["checksum"]


@pytest.mark.slow
def test_a_sampler_that_sleeps_goes_on_with_what_was_put_away(worker_pool, qwen3_dir, rows):
    """Two ranks train on one stream, whose cache holds less than is in flight: vLLM computes some again."""
    engine, strategy = {"sleep_level": 1, "kv_cache_memory_gb": 0.0012}, {"tensor_model_parallel_size": 2}
    settings = {"max_staleness": 2}
    run, other = worker_pool.run(
        fit_stream, qwen3_dir, rows, strategy, 2, settings, engine=engine, world_size=2, **ALONE
    )
    assert other.extra["rows"] == run.extra["rows"]
    check([run], 2)
    assert max(step["mismatch/abs_logp_diff"] for step in run.steps if step["rollout/staleness_max"] == 0) < 1e-4
    (warning,) = (line for line in run.extra["log"] if "in flight x max_model_len" in line)
    assert "responses of a replica in flight x max_model_len=64 = " in warning


class Slept(pl.Callback):
    """How often the engine was sent to sleep, and what the table at start says of it."""

    def __init__(self) -> None:
        self.count, self.table = 0, ""

    def setup(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        sleep = module.engine.sleep

        def counted(level: int) -> int:
            self.count += 1
            return int(sleep(level))

        module.engine.sleep = counted

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        del module.engine.sleep
        self.table = str(module.report.table)


def fit_on_a_gpu_of(free: float, offloads: tuple[str, ...], *arguments: Any, **options: Any) -> Run:
    """A run whose trainer and sampler take 60 GiB of a GPU together."""
    from lightning_megatron_rl.modules import model

    parts = (Part("trainer: weights", 20 * GIB, "", ""), Part("sampler: cache", 40 * GIB, "", ""))
    check_gpu, slept = model.check_gpu, Slept()
    model.check_gpu = lambda *_, **__: MemoryPlan(parts[:1], parts[1:], free=free * GIB, apart=True)
    try:
        strategy = {"offload_while_sampling": [*offloads]} if offloads else {}
        run = fit_stream(*arguments[:2], strategy, *arguments[2:], callbacks=[slept], **options)
    finally:
        model.check_gpu = check_gpu
    run.extra |= {"slept": slept.count, "table": slept.table}
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("free", "offloads", "stays"), [(80.0, (), True), (61.0, (), False), (80.0, ("optimizer",), False)]
)
def test_a_sampler_stays_awake_where_both_fit(worker_pool, qwen3_dir, rows, free, offloads, stays):
    """What is under way keeps its cache then. Fails without the plan: it sleeps after each of the six rollouts."""
    engine = {"sleep_level": 1, "max_num_seqs": 32}
    settings = {"max_staleness": 2, "placement": "shared"}
    arguments = (free, offloads, qwen3_dir, rows, 1, settings)
    (run,) = worker_pool.run(fit_on_a_gpu_of, *arguments, engine=engine, world_size=1, **ALONE)
    check([run], 2)
    assert run.extra["slept"] == 1 if stays else run.extra["slept"] > ROWS // BATCH  # before the model is built, always
    assert ("fits beside the trainer (sleep_level=1 is not needed)" in run.extra["table"]) == stays


# ---- refused ---------------------------------------------------------------------------------------------------------

PARTS = {"placement": "separate", "batch_parts": 2}


def even(counts: Any, lengths: Tensor, group_lengths: Tensor, max_length: int) -> Tensor:
    return torch.ones_like(lengths) / counts.tokens


@pytest.mark.parametrize(
    ("settings", "module", "message"),
    [
        ({}, {"engine": "replay"}, "max_staleness=1 with engine=ReplayEngine, which samples whole batches"),
        ({}, {"engine": "vllm", "sampling": SamplingParams(max_tokens=9, stop=("]",))},
         r"max_staleness=1 with sampling.stop=\['\]'\]"),
        ({"on_update": "kept"}, {"engine": "sleeps"}, "on_update='kept' with engine.sleep_level=1"),
        ({"on_update": "finished"}, {"engine": "sleeps"}, "on_update='finished' with engine.sleep_level=1"),
        ({"placement": "separate"}, {"engine": "sleeps"}, "placement='separate' with engine.sleep_level=1"),
        ({"in_flight": 3}, {"engine": "vllm"}, r"streaming.in_flight=3 < data.batch_size=4"),
        ({"batch_parts": 2}, {"engine": "vllm"},
         r"batch_parts=2: the sampler works while the trainer waits, and not beside it. Set batch_parts=1, or pl"),
        (PARTS | {"batch_parts": 3}, {"engine": "vllm"}, r"batch_parts=3 does not divide the 4 prompts .* 4 / 3 = 1.3"),
        (PARTS, {"engine": "vllm", "updates_per_rollout": 2},
         "batch_parts=2 with updates_per_rollout=2: the whole batch is scored before its update. Set batch_parts=1"),
        (PARTS, {"engine": "vllm", "overlong": OverlongSettings(filter=True)}, "batch_parts=2 with overlong.filter: "),
        (PARTS, {"engine": "vllm", "loss": GRPOLossConfig(advantage="reinforce_pp")},
         "loss.advantage='reinforce_pp', which compares a group with the whole batch: choose one of grpo, dr_grpo, rl"),
        (PARTS, {"engine": "vllm", "loss": GRPOLossConfig(aggregation=even)},
         "loss.aggregation=<function even.*whose weights of a part are not known: choose one of token_mean, seq"),
        (PARTS, {"engine": "vllm", "make_module": PPOModule}, "PPOModule, whose critic judges the whole batch first"),
    ],
)  # fmt: skip
def test_what_cannot_stream_is_refused_before_anything_starts(
    worker_pool, broken_model, qwen3_dir, rows, settings, module, message
):
    with pytest.raises(WorkerError, match=message):
        worker_pool.run(refuse, broken_model, qwen3_dir, rows, settings, module, world_size=1, **ALONE)


def test_parts_of_a_mixture_are_refused(worker_pool, qwen3_moe_dir, rows):
    arguments = (qwen3_moe_dir, qwen3_moe_dir, rows, PARTS, {"engine": "vllm"})
    with pytest.raises(
        WorkerError, match="batch_parts=2 with a mixture of 4 experts, whose balance loss is weighed by"
    ):
        worker_pool.run(refuse, *arguments, world_size=1, **ALONE)


def test_parts_whose_gradients_would_move_are_refused(worker_pool, broken_model, qwen3_dir, rows):
    arguments = (broken_model, qwen3_dir, rows, PARTS, {"engine": "vllm"}, {"offload_while_sampling": ["gradients"]})
    with pytest.raises(WorkerError, match=r"offload_while_sampling=\['gradients'\] would move gradients between two p"):
        worker_pool.run(refuse, *arguments, world_size=1, **ALONE)


def refuse(
    model: Path,
    tokenizer: Path,
    rows: Path,
    settings: dict[str, Any],
    module: dict[str, Any],
    strategy: dict[str, Any] | None = None,
) -> None:
    make_module = module.pop("make_module", None)
    engines = {
        "vllm": lambda: VLLMEngine(max_model_len=64),
        "sleeps": lambda: VLLMEngine(max_model_len=64, sleep_level=1),
        "replay": lambda: ReplayEngine(recorded_samples()),
    }
    fit_grpo(
        model,
        strategy or {},
        1,
        make_module=make_module,
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
        ({"batch_parts": 0}, "streaming.batch_parts=0 must be at least 1"),
        ({"batch_parts": 2}, "streaming.batch_parts=2 with max_staleness=0: a synchronous run waits for its whole"),
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
