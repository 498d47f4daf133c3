"""PPO: actor and critic in every layout, plain formulas on Transformers' models, and what the critic brings along."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.models.layers.value_head import new_weight
from lightning_megatron_rl.modules.critic import CriticSettings, ValueLoss, add_value_metrics, token_rewards
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.ppo import PPOModule
from lightning_megatron_rl.modules.reference import ReferenceSettings
from lightning_megatron_rl.rollout.generate import generate_samples
from lightning_megatron_rl.rollout.protocol import SamplingParams
from tests.distributed import WorkerError
from tests.modules.ppo_runs import fit_ppo
from tests.modules.preference_runs import fit_pairs
from tests.modules.runs import NUM_GENERATIONS, ReplayEngine, length, parity, prompts
from tests.selection import by_default
from tests.strategy.test_megatron import LAYOUTS, RELATIVE
from tests.tiny_models import make_tokenizer
from tests.training import Run, fit_sft


def job(pool: Any, model: Any, layout: str = "single", **kwargs: Any) -> list[Run]:
    world_size, strategy = {**LAYOUTS, "single": (1, {})}[layout]
    return pool.run(fit_ppo, model, strategy, world_size, world_size=world_size, init_process_group=False, **kwargs)


def assert_same_weights(run: Run, reference: Run) -> None:
    for mine, theirs in ((run.weights, reference.weights), (run.extra["critic"], reference.extra["critic"])):
        assert mine.keys() == theirs.keys()
        for name, weight in theirs.items():
            error = (mine[name] - weight).norm() / weight.norm()
            assert error <= RELATIVE, f"{name}: {error:.1e}"


@pytest.fixture(scope="module")
def critic_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("critic") / "model"


@pytest.fixture(scope="module")
def reference(worker_pool, qwen3_dir, critic_dir) -> Run:
    return job(worker_pool, qwen3_dir, critic_to=critic_dir)[0]


@pytest.mark.parametrize("layout", by_default(["tp2_sp", "dp2"], ["tp2_sp", "pp2", "dp2", "cp2"]))
def test_layout_gives_the_numbers_of_one_process(worker_pool, qwen3_dir, reference, layout):
    runs = job(worker_pool, qwen3_dir, layout)
    for run in runs:
        assert run.steps == runs[0].steps, "a rank logged something else"
    for mine, theirs in zip(runs[0].steps, reference.steps, strict=True):
        for name, value in theirs.items():
            if not name.startswith(("time/", "perf/")):
                # losses with whitened advantages cancel to nearly nothing: compare them on the scale of an advantage
                assert mine[name] == pytest.approx(value, rel=RELATIVE, abs=1e-6), name
    assert_same_weights(runs[0], reference)


def test_first_updates_equal_transformers_and_plain_formulas(worker_pool, qwen3_dir):
    """Values, GAE as the sum it abbreviates, both losses and both gradient norms, with nothing of ours."""
    run = job(worker_pool, qwen3_dir, steps=1, module={"updates_per_rollout": 1})[0]
    actor = AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32)
    critic = AutoModelForSequenceClassification.from_pretrained(qwen3_dir, num_labels=1, dtype=torch.float32)
    critic.score.weight.data.copy_(new_weight(64))
    samples = generate_samples(
        ReplayEngine(), prompts(4), SamplingParams(temperature=0.8, max_tokens=10), num_generations=NUM_GENERATIONS,
        tokenizer=make_tokenizer(), seed=1234, step=0,
    )  # fmt: skip
    rewards = torch.tensor(parity(samples)) + 0.5 * torch.tensor(length(samples))
    gamma, lam = 0.9, 0.8
    values, advantages = [], []
    for sample, reward in zip(samples, rewards, strict=True):
        start = len(sample.prompt.token_ids)
        ids = torch.tensor([sample.prompt.token_ids + sample.response_ids])
        value = critic.score(critic.model(ids).last_hidden_state)[0, start - 1 : -1, 0]
        n, v = len(value), value.detach().tolist()
        deltas = [(reward.item() if t == n - 1 else gamma * v[t + 1]) - v[t] for t in range(n)]
        advantages.append(
            torch.tensor([sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)])
        )
        values.append(value)
    flat = torch.cat(advantages).double()
    mean, std = flat.mean(), flat.std()
    value_loss, policy_loss = torch.zeros(()), torch.zeros(())
    for sample, value, advantage in zip(samples, values, advantages, strict=True):
        returns = advantage + value.detach()
        value_loss = value_loss + (0.5 * (value - returns).square()).mean() / len(samples)
        start = len(sample.prompt.token_ids)
        ids = torch.tensor([sample.prompt.token_ids + sample.response_ids])
        table = (actor(ids).logits[0, start - 1 : -1] / 0.8).log_softmax(-1)
        logprobs = table.gather(-1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        weight = (logprobs.detach() - torch.tensor(sample.response_logprobs)).exp().clamp(max=2.0)
        white = ((advantage - mean) / (std + 1e-6)).float()
        entropy = -(table.exp() * table).sum(-1)
        losses = -(logprobs - logprobs.detach()).exp() * white * weight - 0.01 * entropy
        policy_loss = policy_loss + losses.mean() / len(samples)
    for model, loss, prefix in ((critic, value_loss, "critic"), (actor, policy_loss, "policy")):
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        assert run.steps[0][f"{prefix}/loss"] == pytest.approx(loss.item(), rel=RELATIVE, abs=1e-6)  # cancels
        assert run.steps[0][f"{prefix}/grad_norm"] == pytest.approx(norm.item(), rel=RELATIVE)
    error, returns = torch.cat(advantages), torch.cat(advantages) + torch.cat(values).detach()
    explained = 1 - error.var() / returns.var()
    assert run.steps[0]["critic/explained_var"] == pytest.approx(explained.item(), rel=RELATIVE)
    assert run.steps[0]["critic/lr"] == pytest.approx(2e-3)


class Advantages(Callback):
    """Of the samples of all steps, and of their tokens that count."""

    def __init__(self) -> None:
        self.found: list[tuple[float, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        rollout = module.last_rollout
        for sample, sequence in zip(rollout.samples, rollout.sequences, strict=True):
            self.found.append((sample.advantage, sequence.fields["advantages"][sequence.loss_mask]))


def fit_and_keep_advantages(model: Path) -> list[tuple[float, torch.Tensor]]:
    kept = Advantages()
    fit_ppo(model, {}, 1, steps=1, callbacks=[kept])
    return kept.found


def test_a_samples_advantage_is_the_mean_of_its_tokens(worker_pool, qwen3_dir):
    """Which records and reports of samples show."""
    (found,) = worker_pool.run(fit_and_keep_advantages, qwen3_dir, world_size=1, init_process_group=False)
    assert len(found) == 4 * NUM_GENERATIONS
    for advantage, of_tokens in found:
        assert advantage == pytest.approx(of_tokens.mean().item())
        assert advantage != 0


def test_warm_up_trains_the_critic_alone(worker_pool, qwen3_dir):
    run = job(worker_pool, qwen3_dir, "tp2_sp", critic={"warmup_rollouts": 1})[0]
    assert run.extra["moved"] == [False, True]
    assert "policy/loss" not in run.steps[0]
    assert run.steps[0]["critic/grad_norm"] > 0
    head = run.extra["critic"]["score.weight"]
    assert (head - new_weight(64)).norm() > 0


def test_critic_starts_from_a_reward_model_or_another_critic(worker_pool, qwen3_dir, reference, critic_dir):
    """Its own weights and its own head: with a learning rate of nearly nothing they come out as they went in."""
    from megatron.core.optimizer import OptimizerConfig

    saved = load_file(critic_dir / "model.safetensors")
    assert saved.keys() == reference.extra["critic"].keys()
    module = {"critic_optimizer": OptimizerConfig(lr=1e-12, weight_decay=0.0)}
    run = job(worker_pool, qwen3_dir, "pp2", steps=1, critic={"model": str(critic_dir)}, module=module)[0]
    for name, weight in saved.items():
        torch.testing.assert_close(run.extra["critic"][name], weight)
    assert not torch.equal(saved["model.embed_tokens.weight"], run.weights["model.embed_tokens.weight"])


@pytest.mark.slow
def test_critic_starts_from_a_reward_models_checkpoint(worker_pool, qwen3_dir, tmp_path):
    """Of another layout, without a conversion. The head is trained, and not the new one that `model` would give it."""
    from megatron.core.optimizer import OptimizerConfig

    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1)
    saving = {"callbacks": [keeper], "trainer": {"enable_checkpointing": True, "max_steps": 1}}
    world, strategy = LAYOUTS["tp2_sp"]
    arguments = (fit_pairs, "reward", qwen3_dir, strategy, world)
    judge = worker_pool.run(*arguments, world_size=world, init_process_group=False, **saving)[0]
    module = {"critic_optimizer": OptimizerConfig(lr=1e-12, weight_decay=0.0)}
    critic = {"init_from": str(tmp_path / "step=1.ckpt")}
    run = job(worker_pool, qwen3_dir, "pp2", steps=1, critic=critic, module=module)[0]
    assert run.extra["critic"].keys() == judge.weights.keys()
    for name, weight in judge.weights.items():
        torch.testing.assert_close(run.extra["critic"][name], weight)
    assert not torch.equal(judge.weights["score.weight"], new_weight(64))


def test_critic_from_a_language_models_checkpoint_is_refused(worker_pool, qwen3_dir, tmp_path):
    """Its output layer has the head's name: fails if shapes of a vocabulary's length are not compared."""
    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1)
    saving = {"callbacks": [keeper], "trainer": {"enable_checkpointing": True}, "steps": 1}
    worker_pool.run(fit_sft, qwen3_dir, {}, 1, world_size=1, init_process_group=False, **saving)
    with pytest.raises(WorkerError, match=r"1 have another shape .*output_layer.weight \(128, 64\) != \(1, 64\)"):
        job(worker_pool, qwen3_dir, critic={"init_from": str(tmp_path / "step=1.ckpt")})
    with pytest.raises(WorkerError, match="does not exist"):
        job(worker_pool, qwen3_dir, critic={"init_from": str(tmp_path / "nothing")})


@pytest.mark.parametrize("plain", by_default([False], [False, True]), ids=["distributed optimizer", "plain"])
def test_checkpoint_of_both_resumes_in_another_layout(worker_pool, qwen3_dir, reference, tmp_path, plain):
    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    saving = {"callbacks": [keeper], "trainer": {"enable_checkpointing": True}, "steps": 1}
    world, strategy = LAYOUTS["tp2_sp"]
    strategy = {**strategy, "use_distributed_optimizer": not plain}
    worker_pool.run(fit_ppo, qwen3_dir, strategy, world, world_size=world, init_process_group=False, **saving)
    resumed = {"ckpt_path": str(tmp_path / "step=1.ckpt")}
    strategy = {**LAYOUTS["pp2"][1], "use_distributed_optimizer": not plain}
    run = worker_pool.run(fit_ppo, qwen3_dir, strategy, 2, world_size=2, init_process_group=False, **resumed)[0]
    assert len(run.steps) == 1
    assert_same_weights(run, reference)


def test_critic_of_another_family_is_refused(worker_pool, qwen3_dir, qwen3_moe_dir):
    with pytest.raises(WorkerError, match="is a mixture of 4 experts"):
        job(worker_pool, qwen3_dir, critic={"model": str(qwen3_moe_dir)})
    experts = (qwen3_moe_dir, {"expert_model_parallel_size": 2}, 2)
    with pytest.raises(WorkerError, match=rf"critic '{qwen3_dir}': expert_model_parallel_size=2, but a qwen3 model"):
        worker_pool.run(fit_ppo, *experts, critic={"model": str(qwen3_dir)}, world_size=2, init_process_group=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.1}, r"gamma=1\.1"),
        ({"lam": -0.1}, r"lam=-0\.1"),
        ({"value_clip": 0.0}, r"value_clip=0\.0"),
        ({"warmup_rollouts": -1}, "warmup_rollouts=-1"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CriticSettings(**options)


class FakeBatch:
    """The three things of a micro-batch that a value loss reads."""

    def __init__(self, old: list[float], returns: list[float], mask: list[bool]) -> None:
        self.fields = {"values": torch.tensor([old]), "returns": torch.tensor([returns])}
        self.mask = torch.tensor([mask])


def test_value_loss_by_hand():
    """V 1 -> clipped 0.2; V 0.1 is within the bound; V -1 -> clipped -0.2, which is nearer; masked: nan."""
    batch: Any = FakeBatch([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [True, True, True, False])
    values = torch.tensor([[1.0, 0.1, -1.0, math.nan]])
    tally = Tally()
    losses = ValueLoss(0.2)(batch, values, tally)
    assert losses[0].tolist() == pytest.approx([0.5 * 0.8**2, 0.5 * 0.9**2, 0.5 * 2**2, 0.5])
    assert tally.compute() == {"critic/clip_frac": pytest.approx(1 / 3)}
    assert ValueLoss(None)(batch, values, Tally())[0, :3].tolist() == pytest.approx([0.0, 0.5 * 0.81, 2.0])


def test_reward_is_on_the_last_own_token_and_kl_on_each():
    masks = [torch.tensor([False, True, True, False]), torch.tensor([False, False])]
    rewards = torch.tensor([2.0, 3.0])
    assert [row.tolist() for row in token_rewards(rewards, masks)] == [[0, 0, 2, 0], [0, 0]]
    penalties = [torch.tensor([0.0, -0.5, -0.25, 0.0]), torch.zeros(2)]
    assert [row.tolist() for row in token_rewards(rewards, masks, penalties)] == [[0, -0.5, 1.75, 0], [0, 0]]


def test_one_response_with_kl_in_the_reward_and_a_refreshed_reference(worker_pool, qwen3_dir, tmp_path):
    """The penalty of each token reaches the returns, and critic and reference are both in the checkpoint."""
    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    module = {
        "num_generations": 1,
        "loss": GRPOLossConfig(kl_coef=0.5, kl_in="reward", aggregation="seq_mean_token_mean"),
        "reference": ReferenceSettings(refresh_every_n_steps=1),
    }
    saving = {"callbacks": [keeper], "trainer": {"enable_checkpointing": True}}
    reference = job(worker_pool, qwen3_dir, module=module, **saving)[0]
    # refreshed before the second step, so that its policy is its reference
    assert [step["reward/kl_penalty"] for step in reference.steps] == [pytest.approx(0, abs=1e-6)] * 2
    assert all(step[f"{of}/kl_capped_frac"] == 0 for step in reference.steps for of in ("reward", "policy"))
    without = job(worker_pool, qwen3_dir, module={**module, "reference": ReferenceSettings()})[0]
    assert abs(without.steps[1]["reward/kl_penalty"]) > 1e-5
    assert without.steps[1]["critic/return_mean"] != reference.steps[1]["critic/return_mean"]
    resumed = job(worker_pool, qwen3_dir, "dp2", module=module, ckpt_path=str(tmp_path / "step=1.ckpt"))[0]
    assert_same_weights(resumed, reference)


def test_explained_variance():
    mask = torch.tensor([False, True, True, True])
    returns = torch.tensor([9.0, 1.0, 2.0, 3.0])
    for values, expected in ((returns, 1.0), (torch.zeros(4), 0.0), (returns + 5, 1.0), (-returns, -3.0)):
        tally = Tally()
        add_value_metrics(tally, values, returns, mask)
        assert tally.compute()["critic/explained_var"] == pytest.approx(expected)
    tally = Tally()
    add_value_metrics(tally, returns, torch.ones(4), mask)
    assert math.isnan(tally.compute()["critic/explained_var"])


def test_an_advantage_of_the_loss_is_told_to_do_nothing():
    with pytest.warns(UserWarning, match=r"loss\.advantage='rloo' does nothing: PPOModule's advantages come from"):
        PPOModule("model", rewards=[parity], loss=GRPOLossConfig(advantage="rloo"))


def test_the_table_at_start_names_the_advantage_that_is_used():
    settings = CriticSettings(model="other", lam=0.9, warmup_rollouts=5)
    rows = dict(PPOModule("model", [length], critic=settings, engine=ReplayEngine()).describe_objective())
    assert rows["advantage, loss, aggregation"] == "gae (gamma 1, lam 0.9), ppo_clip, token_mean"
    assert rows["critic"] == "from other, alone for 5 rollouts"
