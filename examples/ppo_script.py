"""PPO from a script: an actor, a critic of its own and generalised advantage estimation, on a machine without a GPU.

Usage, after ``make demo`` has left a model to start from::

    python examples/ppo_script.py

A trained reward model takes the place of the exact answers when vLLM serves it (its head then starts the critic, too)::

    python examples/preferences_script.py --method reward_model
    python -m vllm.entrypoints.openai.api_server --model runs/preferences/reward_model/hf/last --runner pooling \\
        --enforce-eager --gpu-memory-utilization 0.1 --host 127.0.0.1 --port 8011
    python examples/ppo_script.py --reward-model runs/preferences/reward_model/hf/last --server http://127.0.0.1:8011
"""

import argparse

import lightning as L
from lightning.pytorch.loggers import CSVLogger
from megatron.core.optimizer import OptimizerConfig

from lightning_megatron_rl import (
    MegatronStrategy,
    PPOModule,
    PromptDataModule,
    RolloutSamples,
    RunProgress,
    TrainingSettings,
    VLLMEngine,
)
from lightning_megatron_rl.data.arithmetic import ArithmeticRows
from lightning_megatron_rl.modules.critic import CriticSettings
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.rewards import ExactMatch, Reward, VLLMRewardModel
from lightning_megatron_rl.rollout.protocol import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/sft/hf/last", help="directory or hub name of the actor")
    parser.add_argument("--reward-model", help="directory of a reward model, for the critic to start from")
    parser.add_argument("--server", help="address of the vLLM server with the reward model, to be rewarded by it")
    parser.add_argument("--steps", type=int, default=20, help="rollouts")
    parser.add_argument("--prompts", type=int, default=64, help="prompts of a rollout")
    parser.add_argument("--devices", type=int, default=2, help="processes; both models are split over all of them")
    parser.add_argument("--out", default="runs/ppo_script", help="directory of metrics and samples")
    options = parser.parse_args()

    L.seed_everything(1234)
    rewards: list[Reward] = [ExactMatch()]
    weights = [1.0]
    if options.server is not None:
        rewards.append(VLLMRewardModel(options.server))
        weights = [0.0, 1.0]  # exact answers are only looked at
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=MegatronStrategy(
            tensor_model_parallel_size=options.devices, sequence_parallel=options.devices > 1, timeout_s=600
        ),
        max_steps=options.steps,
        gradient_clip_val=1.0,
        val_check_interval=options.steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=CSVLogger(options.out, name="", version=""),
        callbacks=[RunProgress(), RolloutSamples(every_n_steps=5)],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    module = PPOModule(
        model=options.model,
        rewards=rewards,
        reward_weights=weights,
        critic=CriticSettings(model=options.reward_model, gamma=1.0, lam=0.95, warmup_rollouts=options.steps // 4),
        critic_optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0, adam_beta2=0.98),
        num_generations=4,
        updates_per_rollout=2,
        sampling=SamplingParams(temperature=1.0, max_tokens=6),
        loss=GRPOLossConfig(clip_high=0.28),
        engine=VLLMEngine(max_model_len=64, kv_cache_memory_gb=0.25),
        train=TrainingSettings(optimizer=OptimizerConfig(lr=3e-4, weight_decay=0.0, adam_beta2=0.98)),
    )
    data = PromptDataModule(
        train=ArithmeticRows("train", size=3500, lowest_digit_first=True),
        val={"arithmetic": ArithmeticRows("val", size=500, lowest_digit_first=True)},
        tokenizer=options.model,
        batch_size=options.prompts,
        val_batch_size=500,
        max_prompt_length=16,
    )
    trainer.fit(module, data)
    if trainer.is_global_zero:
        metrics = trainer.callback_metrics
        print(f"held-out accuracy after {trainer.global_step} steps: {metrics['val/arithmetic/exact_match']:.3f}")
        print(f"explained variance of the critic: {metrics['critic/explained_var']:.3f}")


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
