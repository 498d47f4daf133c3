"""PPO runs on recorded responses, as functions that a gloo worker runs as one rank of a job."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_megatron_rl.data.loader import GlobalBatches, ResumableLoader
from lightning_megatron_rl.modules.critic import CriticSettings
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.rollout.protocol import SamplingParams
from tests.module_options import nested
from tests.modules.runs import MAX_RESPONSE, NUM_GENERATIONS, ReplayEngine, length, parity, prompts
from tests.training import Recorder, Run, SequenceDataModule, make_trainer


class PositionedPrompts(SequenceDataModule):
    """With a loader whose position Lightning saves and restores."""

    def train_dataloader(self) -> Any:
        shard = self.trainer.distributed_sampler_kwargs
        return ResumableLoader(self.sequences, GlobalBatches(len(self.sequences), self.batch_size, **shard))


class ActorOverTime(Callback):
    """Whether each step changed the actor."""

    def __init__(self) -> None:
        self.moved: list[bool] = []
        self.before: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.before = [parameter.detach().clone() for parameter in module.model.parameters()]

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        now = [parameter.detach() for parameter in module.model.parameters()]
        self.moved.append(not all(torch.equal(old, new) for old, new in zip(self.before, now, strict=True)))


def fit_ppo(
    model: Path,
    strategy: dict[str, Any],
    world_size: int,
    *,
    steps: int = 2,
    batch_size: int = 4,
    critic: dict[str, Any] | None = None,
    module: dict[str, Any] | None = None,
    callbacks: list[Callback] | None = None,
    trainer: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    critic_to: Path | None = None,
) -> Run:
    """Fit a `PPOModule` on recorded responses; `extra` has the critic's weights and which steps moved the actor."""
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.modules.ppo import PPOModule

    def optimizer(lr: float) -> OptimizerConfig:
        return OptimizerConfig(lr=lr, weight_decay=0.01, adam_eps=1e-3)

    options: dict[str, Any] = {
        "rewards": [parity, length],
        "reward_weights": [1.0, 0.5],
        "engine": ReplayEngine(),
        "num_generations": NUM_GENERATIONS,
        "updates_per_rollout": 2,
        "sampling": SamplingParams(temperature=0.8, max_tokens=MAX_RESPONSE),
        "loss": GRPOLossConfig(entropy_coef=0.01, aggregation="seq_mean_token_mean"),
        "critic": CriticSettings(**{"gamma": 0.9, "lam": 0.8, **(critic or {})}),
        "optimizer": optimizer(1e-3),
        "critic_optimizer": optimizer(2e-3),
        "max_tokens_per_microbatch": 96,
        **(module or {}),
    }
    policy = PPOModule(model=str(model), **nested(options))
    recorder, actor = Recorder(), ActorOverTime()
    runner = make_trainer(
        strategy,
        world_size,
        **{"max_steps": steps, "callbacks": [recorder, actor, *(callbacks or [])], **(trainer or {})},
    )
    runner.fit(policy, PositionedPrompts(prompts(2 * batch_size), batch_size), ckpt_path=ckpt_path)
    assert policy.critic is not None
    if critic_to is not None:
        policy.save_critic(critic_to)
    of_critic = {name: w.clone() for name, w in policy.critic.hf_model.export_weights(policy.critic.chunks)}
    weights = {name: tensor.clone() for name, tensor in policy.export_weights()}
    return Run(recorder.steps, weights, {"critic": of_critic, "moved": actor.moved})
