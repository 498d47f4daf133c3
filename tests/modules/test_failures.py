"""A run whose rewards all fail ends with an error, and what a reward does to its samples stays with it."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from lightning_megatron_rl.environments import Environment, Episode, Reply
from lightning_megatron_rl.modules.failures import FailureWatch
from lightning_megatron_rl.modules.shaping import OverlongSettings
from lightning_megatron_rl.rewards import GuardedReward
from lightning_megatron_rl.rollout.protocol import Generation, GenerationRequest, SamplingParams
from lightning_megatron_rl.sample import Prompt, Sample
from tests.distributed import WorkerError
from tests.modules.episode_runs import episode_options, fit_episodes
from tests.modules.runs import ReplayEngine, fit_grpo, length, parity
from tests.training import Run


def broken(samples: list[Sample]) -> list[float]:
    """Fail on every sample."""
    raise KeyError("solution")


def nan(samples: list[Sample]) -> list[float]:
    """Give no number."""
    return [math.nan] * len(samples)


def works_on_first(samples: list[Sample]) -> list[float]:
    """Fail on all samples but those of the first prompt."""
    return [1.0 / (sample.prompt.index == 0) for sample in samples]


def vandal(samples: list[Sample]) -> list[float]:
    """Reward as `parity` does, and spoil everything that can be reached."""
    rewards = parity(samples)
    for sample in samples:
        sample.response_ids.reverse()
        sample.response_logprobs.clear()
        sample.prompt.token_ids.append(7)
        sample.prompt.columns["seen"] = True
        sample.prompt.answer = sample.response = "vandal"
        sample.reward, sample.finish_reason = 99.0, "length"
    samples.clear()
    return rewards


class Unplayable(Environment):
    """Every turn fails, and the prompt is spoiled."""

    def start(self, prompt: Prompt, seed: int) -> Episode:
        prompt.token_ids.clear()
        return UnplayableEpisode()


class UnplayableEpisode(Episode):
    def step(self, action: Any) -> Reply:
        raise RuntimeError("the board is gone")


class Unstartable(Environment):
    """No episode begins, so no token is sampled."""

    def start(self, prompt: Prompt, seed: int) -> Episode:
        raise RuntimeError("no board")


class AllCut(ReplayEngine):
    """The limit has cut every response."""

    def generate(self, requests: list[GenerationRequest], params: SamplingParams) -> list[list[Generation]]:
        groups = super().generate(requests, params)
        return [[replace(answer, finish_reason="length") for answer in group] for group in groups]


def job(pool: Any, model: Any, function: Any = fit_grpo, world_size: int = 1, **kwargs: Any) -> list[Run]:
    strategy = {"timeout_s": 200.0}  # for processes of the pool that this job starts
    return pool.run(function, model, strategy, world_size, world_size=world_size, init_process_group=False, **kwargs)


@pytest.mark.parametrize(
    ("reward", "world_size", "steps", "message"),
    [
        (broken, 1, 4, r"the reward 'broken' failed on all samples of 3 rollouts in a row.*KeyError: 'solution'"),
        (nan, 2, 2, r"the reward 'nan' failed on all samples of 2 rollouts in a row.*return a finite number"),
    ],
)
def test_a_reward_that_always_fails_ends_the_run(worker_pool, qwen3_dir, reward, world_size, steps, message):
    with pytest.raises(WorkerError) as failure:  # on every rank, though a reward beside it works
        job(worker_pool, qwen3_dir, world_size=world_size, steps=steps, rewards=[reward, length])
    assert len(re.findall(message, str(failure.value))) >= world_size, failure.value


def test_an_environment_that_always_fails_ends_the_run(worker_pool, qwen3_dir):
    module = {**episode_options(environment=Unplayable()), "max_failed_rollouts": 1}
    with pytest.raises(WorkerError, match=r"the environment failed on all samples of 1 rollouts.*the board is gone"):
        job(worker_pool, qwen3_dir, fit_episodes, module=module)


def test_some_good_samples_or_no_limit_let_a_run_go_on(worker_pool, qwen3_dir):
    (run,) = job(
        worker_pool, qwen3_dir, steps=1, rewards=[GuardedReward(works_on_first, default=-1.0, deadline_s=20.0)]
    )
    assert run.steps[0]["reward/failed_frac"] == 0.75  # 1 of 4 prompts works
    (run,) = job(worker_pool, qwen3_dir, steps=1, rewards=[broken], module={"max_failed_rollouts": None})
    assert run.steps[0]["reward/failed_frac"] == 1.0


@pytest.mark.parametrize("why", ["filtered", "not begun"])
def test_an_update_without_a_token_to_train_on_has_a_loss_of_zero(worker_pool, qwen3_dir, why):
    """It was nan, and ended the run as a loss that is not finite."""
    if why == "filtered":
        (run,) = job(worker_pool, qwen3_dir, module={"engine": AllCut(), "overlong": OverlongSettings(filter=True)})
        assert run.steps[0]["rollout/truncated_frac"] == 1
    else:
        module = {**episode_options(environment=Unstartable()), "max_failed_rollouts": None}
        (run,) = job(worker_pool, qwen3_dir, fit_episodes, module=module)
        assert run.steps[0]["reward/environment_failed_frac"] == 1
    assert [step["policy/loss"] for step in run.steps] == [0.0, 0.0]
    assert [step["policy/grad_norm"] for step in run.steps] == [0.0, 0.0]


def test_a_reward_cannot_change_what_is_trained_on(worker_pool, qwen3_dir):
    runs = [job(worker_pool, qwen3_dir, rewards=rewards)[0] for rewards in ([parity, length], [vandal, length])]
    names = ("policy/loss", "policy/grad_norm", "reward/mean", "reward/length", "mismatch/abs_logp_diff")
    for before, after in zip(runs[0].steps, runs[1].steps, strict=True):
        assert [before[name] for name in names] == [after[name] for name in names]
        assert after["rollout/truncated_frac"] == before["rollout/truncated_frac"] < 1


def test_watch_counts_in_a_row_and_by_name():
    watch = FailureWatch(2)
    for failed in (True, False, True):
        watch.add("rollouts", "the reward 'a'", failed=failed, errors=["late"])
    watch.add("rollouts", "the reward 'b'", failed=True, errors=[])
    with pytest.raises(
        RuntimeError, match=r"the reward 'b' failed on all samples of 2 rollouts in a row.*another replica"
    ):
        watch.add("rollouts", "the reward 'b'", failed=True, errors=[])
    with pytest.raises(RuntimeError, match="the reward 'b' failed"):
        watch.finish("rollouts")
    watch.finish("validations of 'easy'")
    with pytest.raises(RuntimeError, match=r"a reward failed on all samples of 1 validations of 'easy'"):
        watch.add("validations of 'easy'", "a reward", failed=True, errors=["late"], at_once=True)
    patient = FailureWatch(None)
    for _ in range(9):
        patient.add("rollouts", "the reward 'a'", failed=True, errors=["late"], at_once=True)
    patient.finish("rollouts")
