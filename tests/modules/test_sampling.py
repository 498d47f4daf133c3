"""Episodes in training: one environment, every layout, one number; and that number against Transformers."""

from typing import Any

import pytest
import torch

from lightning_megatron_rl.environments import Calculator, EpisodeSettings
from lightning_megatron_rl.modules.critic import token_rewards
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.rollout.replay import RecordedReward, ReplayEngine
from tests.distributed import WorkerError
from tests.environments.games import Bad
from tests.modules.episode_runs import episode_options, fit_episodes, fit_ppo_episodes
from tests.modules.runs import NUM_GENERATIONS, length, recorded_samples
from tests.selection import by_default
from tests.strategy.test_megatron import LAYOUTS, RELATIVE
from tests.training import Run


def job(pool: Any, model: Any, layout: str = "single", function: Any = fit_episodes, **kwargs: Any) -> list[Run]:
    world_size, strategy = {**LAYOUTS, "single": (1, {})}[layout]
    return pool.run(function, model, strategy, world_size, world_size=world_size, init_process_group=False, **kwargs)


@pytest.fixture(scope="module")
def reference(worker_pool, qwen3_dir) -> Run:
    return job(worker_pool, qwen3_dir)[0]


def assert_same_steps(run: Run, reference: Run) -> None:
    for mine, theirs in zip(run.steps, reference.steps, strict=True):
        for name, value in theirs.items():
            if not name.startswith(("time/", "perf/")):
                # KL and loss of a first update cancel to nearly nothing: on the scale of a log-prob
                assert mine[name] == pytest.approx(value, rel=RELATIVE, abs=1e-6), name


@pytest.mark.parametrize("layout", by_default(["tp2_sp", "dp2"], ["tp2_sp", "pp2", "dp2", "cp2"]))
def test_layout_gives_the_numbers_of_one_process(worker_pool, qwen3_dir, reference, layout):
    runs = job(worker_pool, qwen3_dir, layout)
    for run in runs:
        assert run.steps == runs[0].steps, "a rank logged something else"
    assert runs[0].steps[0].keys() == reference.steps[0].keys()
    assert_same_steps(runs[0], reference)
    for name, weight in reference.weights.items():
        error = (runs[0].weights[name] - weight).norm() / weight.norm()
        assert error <= RELATIVE, f"{name}: {error:.1e}"


def test_a_sampler_that_does_not_tell_drew_what_the_policy_wrote(reference):
    """Replies were counted as drawn; the validation behind the last step is not yet in it."""
    samples = reference.extra["samples"]
    assert any(len(sample.response_ids) > len(sample.policy_ids) for sample in samples)
    assert reference.extra["drawn"] == sum(len(sample.policy_ids) for sample in samples)


def test_first_update_equals_transformers_with_the_replies_left_out(worker_pool, qwen3_dir):
    """Loss, gradient norm and advantages over what the engine sampled, with nothing of ours but the transcripts."""
    from transformers import AutoModelForCausalLM

    run = job(worker_pool, qwen3_dir, steps=1, module={"updates_per_rollout": 1})[0]
    samples = run.extra["samples"]
    assert sum(len(sample.turns) > 1 for sample in samples) >= 4
    rewards = torch.tensor([sum(t.reward for t in s.turns) + s.outcome.reward for s in samples], dtype=torch.float64)
    groups = rewards.view(-1, NUM_GENERATIONS)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()
    model = AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32)
    total, count, mismatch = torch.zeros(()), 0, 0.0
    for sample, advantage in zip(samples, advantages.float(), strict=True):
        start = len(sample.prompt.token_ids)
        ids = torch.tensor([sample.prompt.token_ids + sample.response_ids])
        table = (model(ids).logits[0] / 0.8).log_softmax(-1)
        for turn in sample.turns:
            for place in range(start + turn.start, start + turn.stop):
                row, token = table[place - 1], int(ids[0, place])
                old = row[token].detach()
                weight = (old - sample.response_logprobs[place - start]).exp().clamp(max=2.0)
                policy = -(row[token] - old).exp() * advantage * weight
                kl = (old - row[token]).exp() - (old - row[token]) - 1
                total = total + policy + 0.1 * kl + 0.01 * (row.exp() * row).sum()
                count += 1
                mismatch += float((old - sample.response_logprobs[place - start]).abs())
    loss = total / count
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    step = run.steps[0]
    assert step["policy/loss"] == pytest.approx(loss.item(), rel=RELATIVE)
    assert step["policy/grad_norm"] == pytest.approx(norm.item(), rel=RELATIVE)
    assert step["mismatch/abs_logp_diff"] == pytest.approx(mismatch / count, rel=RELATIVE)
    assert step["reward/mean"] == step["reward/environment"] == pytest.approx(rewards.mean().item())
    assert step["rollout/response_len_mean"] == pytest.approx(count / len(samples))
    assert step["episode/turns_mean"] == pytest.approx(sum(len(s.turns) for s in samples) / len(samples))
    assert step["episode/turns_max"] == max(len(s.turns) for s in samples)
    done = [s.outcome.reason == "done" for s in samples]
    assert step["episode/success_frac"] == pytest.approx(sum(done) / len(done))
    replies = sum(len(s.response_ids) for s in samples) - count
    assert replies > 0
    assert step["episode/reply_tokens_mean"] == pytest.approx(replies / len(samples))


def test_recorded_episodes_train_as_the_live_ones(worker_pool, qwen3_dir, reference):
    """What `RolloutSamples` keeps of an episode is all that training needs; `verify-layout` replays it the same way."""
    samples = reference.extra["samples"]
    module = {"engine": ReplayEngine(samples), "environment": None, "episodes": None}
    module |= {"rewards": [RecordedReward(samples)]}
    run = job(worker_pool, qwen3_dir, module=module)[0]
    for mine, theirs in zip(run.steps, reference.steps, strict=True):
        for name in ("policy/loss", "policy/grad_norm", "mismatch/ess", "episode/turns_mean", "reward/mean"):
            assert mine[name] == theirs[name], name


def test_reward_functions_come_on_top(worker_pool, qwen3_dir, reference):
    step = job(worker_pool, qwen3_dir, steps=1, module={"rewards": [length], "reward_weights": [0.5]})[0].steps[0]
    assert step["reward/environment"] == reference.steps[0]["reward/environment"]
    assert step["reward/mean"] == pytest.approx(step["reward/environment"] + 0.5 * step["reward/length"])


def test_failures_are_counted_on_every_rank(worker_pool, qwen3_dir):
    module = {"environment": Bad("hang"), "episodes": EpisodeSettings(max_turns=3, deadline_s=0.5, default_reward=-1.0)}
    for run in job(worker_pool, qwen3_dir, "tp2_sp", steps=1, module=module):
        assert run.steps[0]["reward/environment_failed_frac"] == run.steps[0]["reward/failed_frac"] == 0.25
        assert run.steps[0]["reward/min"] == -1.0


def test_failure_that_ends_the_run_does_so_on_every_rank(worker_pool, qwen3_dir):
    module = {"environment": Bad(KeyError("x")), "episodes": EpisodeSettings(on_error="raise")}
    with pytest.raises(WorkerError) as failure:
        job(worker_pool, qwen3_dir, "tp2_sp", module=module)
    assert str(failure.value).count("the environment Bad failed in turn 2 of the sample of prompt 1") >= 2


def test_deadline_that_outlasts_the_other_ranks_is_refused(worker_pool, qwen3_dir):
    module = {"episodes": EpisodeSettings(max_turns=4, deadline_s=30.0)}
    with pytest.raises(WorkerError, match=r"6 x 30 = 180 s .*timeout_s=60"):
        job(worker_pool, qwen3_dir, module=module)


@pytest.mark.slow
@pytest.mark.parametrize("layout", by_default(["tp2_sp", "dp2"], ["tp2_sp", "pp2", "dp2", "cp2"]))
def test_critic_judges_episodes_alike_in_every_layout(worker_pool, qwen3_dir, layout):
    alone = job(worker_pool, qwen3_dir, function=fit_ppo_episodes)[0]
    assert_same_steps(job(worker_pool, qwen3_dir, layout, fit_ppo_episodes)[0], alone)


def test_return_of_a_turn_is_what_follows_it(worker_pool, qwen3_dir):
    """Without a discount and with λ = 1 the mean return of all tokens is that of the rewards still to come."""
    run = job(worker_pool, qwen3_dir, function=fit_ppo_episodes, steps=1, critic={"gamma": 1.0, "lam": 1.0})[0]
    returns = []
    for sample in run.extra["samples"]:
        rewards = [turn.reward for turn in sample.turns]
        for number, turn in enumerate(sample.turns):
            returns += [sum(rewards[number:]) + sample.outcome.reward] * (turn.stop - turn.start)
    assert run.steps[0]["critic/return_mean"] == pytest.approx(sum(returns) / len(returns), rel=RELATIVE)


def test_rewards_of_turns_stand_on_their_last_tokens():
    masks = [torch.tensor([False, True, True, False, True, False])]
    (row,) = token_rewards(torch.tensor([2.0]), masks, of_turns=[{2: 0.5, 4: 0.25}])
    assert row.tolist() == [0, 0, 0.5, 0, 1.5, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"environment": None}, r"episodes=.* without an environment"),
        ({"environment": None, "episodes": None}, "there are no rewards"),
        ({"engine": ReplayEngine(recorded_samples(2))}, "environment=Calculator with engine=ReplayEngine"),
        ({"reward_weights": [1.0]}, "there are no rewards"),
        ({"loss": GRPOLossConfig(), "num_generations": 1}, "num_generations=1"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GRPOModule(**{"model": "nothing", **episode_options(environment=Calculator()), **options})
