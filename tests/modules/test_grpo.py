"""GRPO: one rollout, every layout, one number; and that number against Transformers and a plain autograd graph."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_megatron_rl.models.layers.lora import LoRASettings
from lightning_megatron_rl.models.layers.moe import MoESettings
from lightning_megatron_rl.modules.critic import CriticSettings
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.ppo import PPOModule
from lightning_megatron_rl.modules.rollout_batch import Rollout, check_split, repetition
from lightning_megatron_rl.modules.shaping import OverlongSettings
from lightning_megatron_rl.modules.training import TrainingSettings
from lightning_megatron_rl.rewards import GuardedReward
from lightning_megatron_rl.rollout.generate import generate_samples
from lightning_megatron_rl.rollout.protocol import SamplingParams
from tests.distributed import WorkerError
from tests.models.test_quantised import save_quantised
from tests.module_options import nested
from tests.modules.runs import (
    NUM_GENERATIONS,
    ReplayEngine,
    fails_on_long,
    fit_grpo,
    length,
    parity,
    prompts,
    recorded_samples,
)
from tests.selection import by_default
from tests.strategy.test_megatron import LAYOUTS, RELATIVE
from tests.training import Run


def job(pool: Any, model: Any, layout: str = "single", **kwargs: Any) -> list[Run]:
    world_size, strategy = {**LAYOUTS, "single": (1, {})}[layout]
    return pool.run(fit_grpo, model, strategy, world_size, world_size=world_size, init_process_group=False, **kwargs)


@pytest.fixture(scope="module")
def reference(worker_pool, qwen3_dir) -> Run:
    return job(worker_pool, qwen3_dir)[0]


@dataclass
class Halved:
    """A correction with an equality of its own, and so without a hash."""

    by: float = 2.0

    def __call__(self, old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return mask.to(old_logprobs.dtype) / self.by


halved = Halved()


class ScoresFirst(GRPOModule):
    """Has the pass for the old policy's log-probs, also where an update computes them itself."""

    scores_first = True


def without_times(step: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in step.items() if not name.startswith(("time/", "perf/"))}


@pytest.mark.parametrize("layout", by_default(["tp2_sp", "cp2_dp2"], ["tp2_sp", "pp2", "dp2", "cp2_dp2", "pp2_vpp2"]))
def test_layout_gives_the_numbers_of_one_process(worker_pool, qwen3_dir, reference, layout):
    runs = job(worker_pool, qwen3_dir, layout)
    for run in runs:
        assert run.steps == runs[0].steps, "a rank logged something else"
    for mine, theirs in zip(runs[0].steps, reference.steps, strict=True):
        mine, theirs = without_times(mine), without_times(theirs)
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            # KL and loss of a first update cancel to nearly nothing: compare those against the scale of a log-prob
            assert mine[name] == pytest.approx(value, rel=RELATIVE, abs=1e-6), name
    for name, weight in reference.weights.items():
        error = (runs[0].weights[name] - weight).norm() / weight.norm()
        assert error <= RELATIVE, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    "layout", by_default(["single", "cp2_dp2", "pp2_vpp2"], ["single", "tp2_sp", "pp2", "cp2_dp2", "pp2_vpp2"])
)
def test_the_first_update_sees_the_policy_that_was_scored(worker_pool, qwen3_dir, layout):
    """KL(policy, old) before any step: the update repeats the pass that gave the old log-probs, to the bit.

    Fails with dropout in a pass, with stale weights, and with micro-batches laid out otherwise than in the score.
    """
    options = {"steps": 1, "module": {"updates_per_rollout": 1}, "make_module": ScoresFirst}
    (step,) = job(worker_pool, qwen3_dir, layout, **options)[0].steps
    assert "time/old_logp_s" in step
    assert step["policy/kl_old"] == 0.0
    assert step["policy/ratio_max"] == 1.0


@pytest.mark.parametrize("layout", by_default(["cp2_dp2"], ["single", "tp2_sp", "cp2_dp2", "pp2_vpp2"]))
@pytest.mark.parametrize("loss", by_default(["tis", "gspo"], ["tis", "icepop", "vespo", "gspo", "geo_mask"]))
def test_a_single_update_needs_no_pass_before_it(worker_pool, qwen3_dir, layout, loss):
    """Weights are those of a run with the pass, to the bit; of metrics only the order of float64 sums differs."""
    losses: dict[str, dict[str, Any]] = {
        "tis": {},
        "icepop": {"correction": "icepop", "icepop_low": 0.9},
        "vespo": {"policy_loss": "vespo"},
        "gspo": {"policy_loss": "gspo", "aggregation": "seq_mean_token_mean"},
        "geo_mask": {"correction": "geo_mask", "geo_mask_low": 0.5, "geo_mask_high": 2.0},
    }
    options = {"module": {"updates_per_rollout": 1}, "loss": losses[loss]}
    alone = job(worker_pool, qwen3_dir, layout, **options)[0]
    scored = job(worker_pool, qwen3_dir, layout, make_module=ScoresFirst, **options)[0]
    for mine, theirs in zip(alone.steps, scored.steps, strict=True):
        assert "time/old_logp_s" not in mine
        assert theirs["mismatch/abs_logp_diff"] > 0
        assert without_times(mine) == pytest.approx(without_times(theirs), rel=1e-12, abs=1e-15)
        assert mine["policy/grad_norm"] == theirs["policy/grad_norm"]
    for name, weight in scored.weights.items():
        assert torch.equal(alone.weights[name], weight), name


@pytest.mark.parametrize(
    ("options", "scores"),
    [
        ({}, False),
        ({"updates_per_rollout": 2}, True),
        ({"loss": {"correction": None}}, False),
        ({"loss": {"correction": "geo_mask"}}, False),
        ({"loss": {"correction": "tests.modules.test_grpo.halved"}}, True),
        ({"loss": {"correction_level": "sequence"}}, False),
        ({"loss": {"correction": Halved()}}, True),
        ({"loss": {"kl_coef": 0.1}}, False),
        ({"loss": {"kl_coef": 0.1, "kl_in": "reward"}}, True),
        ({"loss": {"top_entropy_quantile": 0.2}}, True),
        ({"loss": {"bypass": True, "correction": None}, "updates_per_rollout": 2}, False),
        ({"overlong": OverlongSettings()}, False),
        ({"overlong": OverlongSettings(filter=True)}, True),
        ({"train": TrainingSettings(lora=LoRASettings(rank=2))}, False),
        ({"train": TrainingSettings(lora=LoRASettings(rank=2, dropout=0.1))}, True),
        ({"train": TrainingSettings(model_config={"attention_dropout": 0.1})}, True),
        ({"train": TrainingSettings(model_config={"hidden_dropout": 0.0})}, False),
        ({"train": TrainingSettings(moe=MoESettings(router_replay="R2"))}, True),
    ],
)
def test_the_pass_remains_where_something_needs_it(options, scores):
    loss = GRPOLossConfig(**options.pop("loss", {}))
    assert GRPOModule("model", rewards=[parity], loss=loss, **options).scores_first is scores


def test_a_critic_that_warms_up_leaves_the_pass():
    """No update of the actor tells of the mismatch then."""
    found = [
        PPOModule("model", rewards=[parity], critic=CriticSettings(warmup_rollouts=count)).scores_first
        for count in (0, 1)
    ]
    assert found == [False, True]


def test_weights_go_to_the_engine_before_every_rollout(reference):
    assert reference.extra["versions"] == [0, 1, 2], "two rollouts, then validation"
    assert reference.extra["names"] == set(reference.weights)
    assert [step["rollout/weight_version"] for step in reference.steps] == [0, 1]
    assert all(step["rollout/staleness"] == 0 for step in reference.steps)
    assert [step["perf/engine_restarts"] for step in reference.steps] == [10, 11], "as the engine counts them"


def test_first_update_equals_transformers_and_autograd(worker_pool, qwen3_dir):
    """Loss and gradient norm of a first update, written down again with Transformers and nothing of ours."""
    run = job(worker_pool, qwen3_dir, steps=1, module={"updates_per_rollout": 1})[0]
    from transformers import AutoModelForCausalLM

    from tests.tiny_models import make_tokenizer

    model = AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32)
    samples = generate_samples(
        ReplayEngine(), prompts(4), SamplingParams(temperature=0.8, max_tokens=10), num_generations=NUM_GENERATIONS,
        tokenizer=make_tokenizer(), seed=1234, step=0,
    )  # fmt: skip
    rewards = torch.tensor(parity(samples)) + 0.5 * torch.tensor(length(samples))
    groups = rewards.view(-1, NUM_GENERATIONS)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()
    total, count = torch.zeros(()), 0
    for sample, advantage in zip(samples, advantages, strict=True):
        start = len(sample.prompt.token_ids)
        ids = torch.tensor([sample.prompt.token_ids + sample.response_ids])
        table = (model(ids).logits[0, start - 1 : -1] / 0.8).log_softmax(-1)
        logprobs = table.gather(-1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        old = logprobs.detach()
        weight = (old - torch.tensor(sample.response_logprobs)).exp().clamp(max=2.0)
        policy = -(logprobs - old).exp() * advantage * weight
        kl = (old - logprobs).exp() - (old - logprobs) - 1  # the reference is the policy itself
        entropy = -(table.exp() * table).sum(-1)
        total = total + (policy + 0.1 * kl - 0.01 * entropy).sum()
        count += len(sample.response_ids)
    loss = total / count
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert run.steps[0]["policy/loss"] == pytest.approx(loss.item(), rel=RELATIVE)
    assert run.steps[0]["policy/grad_norm"] == pytest.approx(norm.item(), rel=RELATIVE)
    assert run.steps[0]["policy/kl_old"] == pytest.approx(0.0, abs=1e-8)


def test_failing_reward_names_its_sample_on_every_rank(worker_pool, qwen3_dir):
    """The rank that computes rewards fails; the other must not wait for it."""
    with pytest.raises(WorkerError) as failure:
        job(worker_pool, qwen3_dir, "tp2_sp", rewards=[GuardedReward(fails_on_long, deadline_s=20.0, on_error="raise")])
    message = str(failure.value)
    assert message.count("fails_on_long") >= 2
    assert "ZeroDivisionError" in message
    assert "rank 1 of 2" in message


def test_failing_reward_costs_its_samples_the_default_and_is_counted(worker_pool, qwen3_dir):
    guard = GuardedReward(fails_on_long, deadline_s=20.0, default=-3.0)
    runs = job(worker_pool, qwen3_dir, "tp2_sp", steps=1, rewards=[guard])
    failed = sum(len(sample.response_ids) == 3 for sample in recorded_samples(4)) / (4 * NUM_GENERATIONS)
    assert failed > 0
    for run in runs:
        assert run.steps[0]["reward/fails_on_long_failed_frac"] == failed
        assert run.steps[0]["reward/failed_frac"] == failed
        assert run.steps[0]["reward/min"] == -3.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations": 1}, "num_generations=1"),
        ({"updates_per_rollout": 0}, "updates_per_rollout=0"),
        ({"rewards": []}, "there are no rewards"),
        ({"reward_weights": [1.0, 2.0]}, "2 reward weights for 1 rewards"),
        ({"sampling": SamplingParams(temperature=0.0)}, "greedy"),
        ({"sampling": SamplingParams(top_p=0.9)}, "top_p=0.9"),
        ({"max_tokens_per_microbatch": 0}, "max_tokens_per_microbatch=0"),
    ],
)
def test_settings_that_cannot_train_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GRPOModule(**nested({"model": "nothing", "rewards": [length], "engine": ReplayEngine(), **options}))


def test_validation_is_greedy_and_otherwise_as_training():
    sampling = SamplingParams(max_tokens=7, stop=("x",), ignore_eos=True)
    module = GRPOModule("nothing", [length], engine=ReplayEngine(), sampling=sampling)
    assert module.validation_sampling == SamplingParams(temperature=0.0, max_tokens=7, stop=("x",), ignore_eos=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": "grpoo"}, "grpoo.*dr_grpo"),
        ({"aggregation": "mean"}, "mean.*token_mean"),
        ({"kl_estimator": "k4"}, "k4.*k3"),
        ({"clip_low": 1.5}, "clip_low=1.5"),
        ({"kl_coef": -1.0}, "kl_coef=-1.0"),
    ],
)
def test_unknown_or_impossible_loss_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GRPOLossConfig(**options)


def test_micro_batch_that_a_sample_may_not_fit_is_refused(worker_pool, qwen3_dir):
    with pytest.raises(WorkerError, match=r"max_tokens_per_microbatch=32 < engine\.max_model_len=64"):
        job(worker_pool, qwen3_dir, module={"max_tokens_per_microbatch": 32})


def test_micro_batch_without_room_for_the_padding_of_a_sample_is_refused(worker_pool, qwen3_dir):
    """Context parallelism of two pads sequences to multiples of four: the run would have ended with the first."""
    engine = ReplayEngine()
    engine.max_model_len = 63
    with pytest.raises(WorkerError, match=r"=63 < engine\.max_model_len=63, with padding 64: .* Raise .* to 64 or"):
        job(worker_pool, qwen3_dir, "cp2", module={"engine": engine, "max_tokens_per_microbatch": 63})


def test_quantised_model_is_refused_with_the_way_out(worker_pool, qwen3_dir, tmp_path):
    save_quantised(qwen3_dir, tmp_path / "fp8")
    with pytest.raises(WorkerError, match=r"is quantised \(fp8\): the sampler .* `lightning-megatron-rl convert"):
        job(worker_pool, tmp_path / "fp8")


def test_prompts_that_do_not_divide_are_refused_with_the_arithmetic():
    with pytest.raises(ValueError, match=r"6 / 4 = 1.50"):
        check_split(6, 4)
    rollout = Rollout([None] * 24, [None] * 24, NUM_GENERATIONS)  # type: ignore[list-item]
    assert [len(part.samples) for part in rollout.split(3)] == [8, 8, 8]


def test_repetition():
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(0.2)
    assert repetition([1, 2]) == 0.0
