"""GRPO that samples ahead of training, on a machine without a GPU; and the same run again, from its record.

Usage, after ``make demo`` has left a model to start from::

    python examples/streaming_script.py
    python examples/streaming_script.py --replay runs/streaming_script/samples/rollouts-dp0.jsonl --out runs/replay

Sampler and trainer work at the same time: give each a core of its own where there are two. docs/asynchronous.md says
what the settings mean.
"""

import argparse
import hashlib

import lightning as L
from lightning.pytorch.loggers import CSVLogger
from megatron.core.optimizer import OptimizerConfig

from lightning_megatron_rl import (
    GRPOModule,
    MegatronStrategy,
    PromptDataModule,
    ReplayEngine,
    RolloutSamples,
    RunProgress,
    StreamingSettings,
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
    parser.add_argument("--staleness", type=int, default=2, help="versions that a rollout may be old, 0 waits for each")
    parser.add_argument("--replay", help="record of the first replica of an earlier run: nothing is sampled")
    parser.add_argument("--out", default="runs/streaming_script", help="directory of metrics and samples")
    options = parser.parse_args()

    L.seed_everything(1234)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MegatronStrategy(timeout_s=600),
        max_steps=options.steps,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=CSVLogger(options.out, name="", version=""),
        callbacks=[RunProgress(), RolloutSamples(num_samples=0, max_samples_per_step=None, max_file_mb=None)],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    module = GRPOModule(
        model=options.model,
        rewards=[ExactMatch()],
        num_generations=8,
        sampling=SamplingParams(temperature=1.0, max_tokens=6),
        loss=GRPOLossConfig(clip_high=0.28, correction="tis"),
        streaming=StreamingSettings(max_staleness=options.staleness, placement="separate"),
        engine=ReplayEngine(path=options.replay)
        if options.replay
        else VLLMEngine(max_model_len=64, kv_cache_memory_gb=0.25),
        train=TrainingSettings(optimizer=OptimizerConfig(lr=5e-4, weight_decay=0.0, adam_beta2=0.98)),
    )
    data = PromptDataModule(
        train=ArithmeticRows("train", size=3500, lowest_digit_first=True),
        tokenizer=options.model,
        batch_size=32,
        max_prompt_length=16,
    )
    trainer.fit(module, data)
    metrics, digest = trainer.callback_metrics, hashlib.sha256()
    for _, tensor in module.export_weights():
        digest.update(tensor.numpy().tobytes())
    print(f"staleness of the last batch: at most {metrics['rollout/staleness_max']:.0f}")
    print(f"sha256 of the weights after {trainer.global_step} steps: {digest.hexdigest()}")


if __name__ == "__main__":
    main()
