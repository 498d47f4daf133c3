"""On-policy distillation from a script: a student is drawn to what its teacher would have said to its own responses.

Usage, after ``make demo`` has left a student and a teacher::

    python examples/distillation_script.py
"""

import argparse

import lightning as L
from lightning.pytorch.loggers import CSVLogger
from megatron.core.optimizer import OptimizerConfig

from lightning_megatron_rl import (
    GRPOModule,
    MegatronStrategy,
    PromptDataModule,
    RunProgress,
    TrainingSettings,
    VLLMEngine,
)
from lightning_megatron_rl.data.arithmetic import ArithmeticRows
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.reference import ReferenceSettings
from lightning_megatron_rl.rewards import ExactMatch
from lightning_megatron_rl.rollout.protocol import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", default="runs/demo/sft/hf/last", help="directory or hub name")
    parser.add_argument("--teacher", default="runs/demo/grpo/hf/last", help="a model with the student's tokenizer")
    parser.add_argument("--steps", type=int, default=20, help="rollouts")
    parser.add_argument("--prompts", type=int, default=64, help="prompts of a rollout")
    parser.add_argument("--devices", type=int, default=2, help="processes, each with a replica of both models")
    parser.add_argument("--out", default="runs/distillation_script", help="directory of metrics")
    options = parser.parse_args()

    L.seed_everything(1234)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=MegatronStrategy(timeout_s=600),
        max_steps=options.steps,
        callbacks=[RunProgress()],
        gradient_clip_val=1.0,
        val_check_interval=options.steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=CSVLogger(options.out, name="", version=""),
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    module = GRPOModule(
        model=options.student,
        reference=ReferenceSettings(model=options.teacher),
        rewards=[ExactMatch()],
        reward_weights=[0.0],  # only looked at: all that is learnt comes from the teacher
        num_generations=2,
        sampling=SamplingParams(temperature=1.0, max_tokens=6),
        # k2: on samples of the student its gradient is that of KL(student || teacher)
        loss=GRPOLossConfig(kl_coef=1.0, kl_estimator="k2", aggregation="token_mean"),
        engine=VLLMEngine(max_model_len=64, kv_cache_memory_gb=0.25),
        train=TrainingSettings(optimizer=OptimizerConfig(lr=5e-4, weight_decay=0.0, adam_beta2=0.98)),
    )
    data = PromptDataModule(
        train=ArithmeticRows("train", size=3500, lowest_digit_first=True),
        val={"arithmetic": ArithmeticRows("val", size=500, lowest_digit_first=True)},
        tokenizer=options.student,
        batch_size=options.prompts,
        val_batch_size=500,
        max_prompt_length=16,
    )
    trainer.fit(module, data)
    if trainer.is_global_zero:
        metrics = trainer.callback_metrics
        print(f"KL to the teacher after {trainer.global_step} steps: {metrics['policy/kl_ref']:.4f}")
        print(f"held-out accuracy: {metrics['val/arithmetic/mean_at_1']:.3f}")


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
