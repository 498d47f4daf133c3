"""GRPO from a script: a small model learns to add, on two processes of a machine without a GPU.

Usage, after ``make demo`` has left a model to start from::

    python examples/grpo_script.py                                      # Lightning starts the second process
    torchrun --standalone --nproc-per-node 2 examples/grpo_script.py    # or torchrun does
"""

import argparse

import lightning as L
from lightning.pytorch.loggers import CSVLogger
from megatron.core.optimizer import OptimizerConfig

from lightning_megatron_rl import (
    GRPOModule,
    MegatronStrategy,
    PromptDataModule,
    RolloutSamples,
    RunProgress,
    TrainingSettings,
    VLLMEngine,
)
from lightning_megatron_rl.data.arithmetic import ArithmeticRows
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.rewards import ExactMatch
from lightning_megatron_rl.rollout.protocol import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/sft/hf/last", help="directory or hub name of the model")
    parser.add_argument("--steps", type=int, default=20, help="rollouts")
    parser.add_argument("--devices", type=int, default=2, help="processes; the model is split over all of them")
    parser.add_argument("--out", default="runs/grpo_script", help="directory of metrics and samples")
    options = parser.parse_args()

    L.seed_everything(1234)  # of the samples as well: each has a seed of its own, made of this, the step and the prompt
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
    module = GRPOModule(
        model=options.model,
        rewards=[ExactMatch()],
        num_generations=8,
        updates_per_rollout=2,
        sampling=SamplingParams(temperature=1.0, max_tokens=6),
        loss=GRPOLossConfig(clip_high=0.28, kl_coef=0.001),
        engine=VLLMEngine(max_model_len=64, kv_cache_memory_gb=0.25),
        train=TrainingSettings(optimizer=OptimizerConfig(lr=5e-4, weight_decay=0.0, adam_beta2=0.98)),
    )
    data = PromptDataModule(
        train=ArithmeticRows("train", size=3500, lowest_digit_first=True),
        val={"arithmetic": ArithmeticRows("val", size=500, lowest_digit_first=True)},
        tokenizer=options.model,
        batch_size=64,
        val_batch_size=500,
        max_prompt_length=16,
    )
    trainer.fit(module, data)
    if trainer.is_global_zero:
        metrics = trainer.callback_metrics
        print(f"held-out accuracy after {trainer.global_step} steps: {metrics['val/arithmetic/mean_at_1']:.3f}")


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
