"""Evaluation: the numbers of a hand-made epoch, over replicas, and in runs that stop and save by them."""

import json
import math
import time
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_megatron_rl.callbacks.rollout_samples import RolloutSamples
from lightning_megatron_rl.data.loader import EvaluationLoader, GlobalBatches
from lightning_megatron_rl.modules import evaluation
from lightning_megatron_rl.modules.evaluation import Evaluation, EvaluationSettings, vote
from lightning_megatron_rl.rewards import text_rewards
from lightning_megatron_rl.rewards.limited_child import LimitedChild
from lightning_megatron_rl.rollout.protocol import Generation, GenerationRequest, SamplingParams, SyncReport
from lightning_megatron_rl.sample import Outcome, Prompt, Sample, Turn
from lightning_megatron_rl.weights.source import WeightSource
from tests.distributed import WorkerError
from tests.modules.runs import NUM_GENERATIONS, ReplayEngine, fit_grpo, prompts, recorded_samples
from tests.notices import told
from tests.strategy.test_megatron import LAYOUTS
from tests.training import Run, SequenceDataModule, make_trainer

PAUSE_S = 0.5


def group(dataset: str, rewards: list[float], answers: str | None = None, index: int = 0) -> list[Sample]:
    prompt = Prompt([5], "p", "7", index, dataset)
    answers = answers or "7" * len(rewards)
    return [
        Sample(prompt, [1], [-1.0], text, rewards={"r": reward}, reward=reward)
        for reward, text in zip(rewards, answers, strict=True)
    ]


def same(vector: Any, op: str) -> Any:
    return vector


def test_hand_made_epoch():
    evaluation = Evaluation(EvaluationSettings(num_generations=4))
    evaluation.add(group("a", [1.0]) + group("a", [0.0]) + group("b", [0.5]))
    evaluation.add(group("a", [1, 1, 0, 0], "7789"), 4)
    evaluation.add(group("a", [0, 0, 0, 0], "1111") + group("b", [1, 0, 0, 0], "7123"), 4)
    metrics = evaluation.finish("val", same, list)
    assert metrics["val/a/mean_at_1"] == 0.5
    assert metrics["val/a/r"] == 0.5
    assert metrics["val/a/mean_at_4"] == 0.25
    assert [metrics[f"val/a/pass_at_{k}"] for k in (1, 2, 4)] == pytest.approx([0.25, 5 / 12, 0.5])
    assert metrics["val/a/maj_at_4"] == 0.5
    assert metrics["val/b/maj_at_4"] == 0.25  # four answers with a vote each
    assert metrics["val/b/pass_at_4"] == 1.0
    assert metrics["val/a/mean_at_1_low"] == pytest.approx(0.5 - 1.95996 * math.sqrt(0.5 / 2), abs=1e-5)
    for name in ("mean_at_1", "mean_at_4", "pass_at_1", "pass_at_2", "pass_at_4", "maj_at_4"):
        assert metrics[f"val/a/{name}_low"] < metrics[f"val/a/{name}"] < metrics[f"val/a/{name}_high"], name
    assert len(evaluation.samples) == 3 + 4 + 8
    evaluation.add(group("a", [1.0]))
    assert len(evaluation.samples) == 1, "the next epoch begins with its first samples"


def test_episodes_say_whether_they_succeeded_and_vote_with_their_last_turn():
    evaluation = Evaluation(EvaluationSettings(num_generations=3), has_episodes=True)
    first, second = group("a", [1.0], index=1) + group("a", [0.0], index=2)
    first.turns, first.outcome = [Turn(0, 1, "7"), Turn(0, 0, "9")], Outcome("done", success=True)
    second.turns, second.outcome = [Turn(0, 1, "8")], Outcome("error", error="no")  # says nothing about success
    evaluation.add([first, second])
    several = group("a", [1.0, 1.0, 0.0], "111")  # the transcripts end alike
    for sample, text in zip(several, "778", strict=True):
        sample.turns, sample.outcome = [Turn(0, 1, text)], Outcome("done", success=text == "7")
    evaluation.add(several, 3)
    metrics = evaluation.finish("val", same, list)
    assert metrics["val/a/success_frac"] == 1.0
    assert metrics["val/a/turns_mean"] == 1.5
    assert metrics["val/a/maj_at_3"] == 1.0  # of the transcripts it would be 2 / 3

    only = Evaluation(EvaluationSettings(), has_episodes=True)  # a replica without a prompt
    names: list[str] = list(only.finish("val", same, lambda mine: mine or ["a"]))
    assert {"val/a/success_frac", "val/a/turns_mean"} <= set(names)


def test_replica_without_prompts_of_a_set_knows_its_metrics():
    """Otherwise the ranks would reduce vectors of different lengths."""
    full, empty = (Evaluation(EvaluationSettings(num_generations=2)) for _ in range(2))
    full.add(group("a", [1.0]))
    full.add(group("a", [1.0, 0.0]), 2)
    names: list[list[str]] = []
    metrics = full.finish("val", same, lambda mine: names.append(list(mine)) or list(mine))
    everywhere = iter(names)  # what the union over both replicas gives this one: first the sets, then the rewards
    others = empty.finish("val", same, lambda mine: [*mine, *next(everywhere)])
    assert others.keys() == metrics.keys()
    assert "val/a/maj_at_2_low" in others
    assert all(math.isnan(value) for value in others.values())


@pytest.fixture(scope="module")
def _matcher():
    """The child that patterns are matched in: of this module, where a test may leave nothing running."""
    text_rewards.text_child().ask(["fullmatch", "a", "a"])
    yield
    text_rewards.text_child().close()


@pytest.mark.usefixtures("_matcher")
@pytest.mark.parametrize(
    ("response", "pattern", "expected"),
    [
        ("so \\boxed{1,234}, not 7", None, "1234"),  # one answer with "1,234", "1234" and \\boxed{1234}
        ("\\boxed{1,2}", None, "1,2"),
        ("\\boxed{\\frac{1}{2}} and \\boxed{x^{2}}", None, "x^{2}"),
        ("\\boxed{3", None, "3"),
        ("It is 12.", None, "12"),
        ("1,234.5 or -7", None, "-7"),
        ("1,234,567.5 m", None, "1234567.5"),
        ("the roots are 1,2", None, "2"),  # a list, not the vote of "12"
        ("x = 10,2000", None, "2000"),
        ("It is .5.", None, "0.5"),  # not the vote of "5"
        ("x = -.25", None, "-0.25"),
        (" Paris ", None, "Paris"),
        ("<a>1</a> <a> 2 </a>", "<a>(.*?)</a>", "2"),
        ("nothing", "<a>(.*?)</a>", None),
    ],
)
def test_vote(response, pattern, expected):
    assert vote(response, pattern) == expected


def test_pattern_that_takes_for_ever_costs_its_response_the_vote_alone(monkeypatch):
    child = LimitedChild(text_rewards.WORKER, cpu_seconds=0.5)
    monkeypatch.setattr(evaluation, "text_child", lambda: child)
    with told("on a response of 60 characters took more than 0.5 s of CPU time: no vote"):
        assert [vote(text, "(?:a+)+(b)") for text in ("aab", "a" * 60, "ab")] == ["b", None, "b"]
    child.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations": 1}, "num_generations=1: give at least 2"),
        ({"num_generations": -1}, "num_generations=-1"),
        (
            {"num_generations": 4, "pass_at": (1, 8)},
            r"pass_at=\[1, 8\]: pass@8 .*at least 8 samples, but num_generations=4",
        ),
        ({"pass_at": (1,)}, "num_generations=0"),
        ({"num_generations": 4, "sampling": SamplingParams(temperature=0.0)}, "greedy"),
        ({"confidence": 1.0}, "confidence=1.0"),
        ({"answer_pattern": "("}, "answer_pattern='\\('"),
        ({"answer_pattern": "a"}, "has 0 groups"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        EvaluationSettings(**options)


def test_defaults():
    greedy, training = SamplingParams(temperature=0.0), SamplingParams()
    assert EvaluationSettings().passes(greedy, training) == [(greedy, 1)]
    assert EvaluationSettings(num_generations=6).passes(greedy, training) == [(greedy, 1), (training, 6)]
    assert EvaluationSettings(num_generations=6).ks == (1, 2, 4)
    assert EvaluationSettings(num_generations=8).ks == (1, 2, 4, 8)


class TwoSets(SequenceDataModule):
    """Training prompts, and two named validation sets of which the second is too small for two replicas."""

    def val_dataloader(self) -> Any:
        shard = self.trainer.distributed_sampler_kwargs
        replicas = {"num_replicas": shard["num_replicas"], "rank": shard["rank"]}
        return [
            EvaluationLoader(items, GlobalBatches(len(items), 8, **replicas))
            for items in (prompts(4, "even"), prompts(1, "single"))
        ]


def job(pool: Any, model: Any, layout: str = "single", **kwargs: Any) -> list[Run]:
    """As `fit_grpo`, validating after each step on `TwoSets` with several sampled responses per prompt."""
    world_size, strategy = {**LAYOUTS, "single": (1, {})}[layout]
    options = {
        "data": TwoSets(prompts(4 * kwargs.get("steps", 2)), 4),
        "module": {"evaluation": EvaluationSettings(num_generations=NUM_GENERATIONS), **kwargs.pop("module", {})},
        "trainer": {"val_check_interval": 1, "check_val_every_n_epoch": None, **kwargs.pop("trainer", {})},
    }
    return pool.run(
        fit_grpo, model, strategy, world_size, world_size=world_size, init_process_group=False, **options, **kwargs
    )


def validation(run: Run) -> dict[str, float]:
    return {name: value for name, value in run.steps[-1].items() if name.startswith("val/")}


def test_every_layout_has_the_numbers_of_one_process(worker_pool, qwen3_dir, tmp_path):
    single = validation(job(worker_pool, qwen3_dir, steps=1, callbacks=[RolloutSamples(dirpath=str(tmp_path))])[0])
    names = {name.split("/")[2] for name in single if name.startswith("val/even/")}
    assert {"mean_at_1", "mean_at_4", "mean_at_4_low", "pass_at_2", "pass_at_4_high", "maj_at_4", "parity"} <= names
    assert len([name for name in single if name.startswith("val/single/")]) == len(names)
    runs = job(worker_pool, qwen3_dir, "dp2", steps=1)
    for run in runs:
        assert validation(run) == pytest.approx(single, nan_ok=True)
    lines = [json.loads(line) for line in (tmp_path / "evaluation-dp0.jsonl").read_text().splitlines()]
    assert len(lines) == (4 + 1) * (1 + NUM_GENERATIONS)
    assert {line["dataset"] for line in lines} == {"even", "single"}


def validated_module(**options: Any) -> Any:
    """A policy that another Trainer has validated, with an engine that took long to start."""
    from lightning_megatron_rl.modules.grpo import GRPOModule

    policy = GRPOModule(**options)
    make_trainer({}, 1).validate(policy, TwoSets(prompts(4), 4), verbose=False)
    assert policy.report.phase_seconds["weight_sync"] > 0
    policy.report.phase_seconds["weight_sync"] += 1000
    return policy


def test_times_of_another_trainers_validation_are_not_the_first_steps(worker_pool, qwen3_dir):
    (run,) = job(worker_pool, qwen3_dir, make_module=validated_module)
    assert run.steps[0]["time/step_s"] > run.steps[0]["time/weight_sync_s"]
    assert run.steps[0]["time/step_s"] < 1000


class SlowToSyncAndValidate(ReplayEngine):
    """Takes its time for new weights, for greedy responses and to fall asleep, and next to nothing for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.sleep_level = 1

    def update_weights(self, source: WeightSource, version: int) -> SyncReport:
        """Take weights, so slowly that as long before a step the validation's responses are drawn."""
        time.sleep(3 * PAUSE_S)
        return super().update_weights(source, version)

    def generate(self, requests: list[GenerationRequest], params: SamplingParams) -> list[list[Generation]]:
        """Answer, slowly in a validation."""
        if params.temperature == 0:
            time.sleep(PAUSE_S)
        return super().generate(requests, params)

    def sleep(self, level: int) -> int:
        """Fall asleep, slowly."""
        time.sleep(PAUSE_S)
        return 0

    def wake(self, tags: list[str] | None = None) -> None:
        """Wake at once."""


def test_what_a_validation_did_is_not_the_next_steps(worker_pool, qwen3_dir):
    """Of its work the step has the weights alone, which both sample with; its responses are not the step's."""
    module = {"engine": SlowToSyncAndValidate(), "evaluation": EvaluationSettings()}
    (run,) = job(worker_pool, qwen3_dir, module=module)
    first, second = run.steps
    assert second["perf/sampler_idle_frac"] > 0.9
    for step in (first, second):
        assert PAUSE_S <= step["time/sleep_s"] < 2 * PAUSE_S, "after its own rollout alone"
        assert 3 * PAUSE_S <= step["time/weight_sync_s"] < 6 * PAUSE_S, "once"
        assert step["time/step_s"] >= 4 * PAUSE_S
    tokens = sum(len(sample.response_ids) for sample in recorded_samples(8)[4 * NUM_GENERATIONS :])
    assert second["perf/sampler_tokens_per_s"] * PAUSE_S < tokens, "in a step that took longer"


def test_early_stopping_and_checkpoints_monitor_them(worker_pool, qwen3_dir, tmp_path):
    """The recorded responses never change, so nothing improves: stopped after the second validation of ten."""
    monitor = "val/even/pass_at_2"
    stop = EarlyStopping(monitor=monitor, mode="max", patience=1)
    save = ModelCheckpoint(dirpath=tmp_path, monitor=monitor, mode="max", filename="best")
    (run,) = job(worker_pool, qwen3_dir, steps=4, callbacks=[stop, save], trainer={"enable_checkpointing": True})
    assert len(run.steps) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["best.ckpt"]


def test_responses_too_long_for_the_engine_are_refused_before_training(worker_pool, qwen3_dir):
    settings = EvaluationSettings(num_generations=4, sampling=SamplingParams(max_tokens=64))
    with pytest.raises(WorkerError, match=r"evaluation.sampling.max_tokens=64 leaves no room .*max_model_len=64"):
        job(worker_pool, qwen3_dir, module={"evaluation": settings})
