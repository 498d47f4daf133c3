"""A reward model, then DPO, from a script: preference pairs of right and wrong sums on a machine without a GPU.

Usage, after ``make demo`` has left a model to start from::

    python examples/preferences_script.py --devices 2
"""

import argparse
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import CSVLogger
from megatron.core.optimizer import OptimizerConfig

from lightning_megatron_rl import (
    DPOModule,
    HFExport,
    MegatronStrategy,
    PreferenceDataModule,
    RewardModule,
    RunProgress,
    TrainingSettings,
)
from lightning_megatron_rl.data.arithmetic import ArithmeticPairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/sft/hf/last", help="directory or hub name of the model")
    parser.add_argument("--method", choices=["reward_model", "dpo"], default="reward_model")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--devices", type=int, default=2, help="processes; the model is split over all of them")
    parser.add_argument("--out", default="runs/preferences", help="directory of metrics and exports")
    options = parser.parse_args()

    optimizer = OptimizerConfig(lr=5e-4, weight_decay=0.0, adam_beta2=0.98)
    module: L.LightningModule
    if options.method == "dpo":
        module = DPOModule(model=options.model, beta=0.1, train=TrainingSettings(optimizer=optimizer))
    else:
        module = RewardModule(model=options.model, train=TrainingSettings(optimizer=optimizer))
    data = PreferenceDataModule(
        train=ArithmeticPairs("train", size=3500, lowest_digit_first=True),
        val={"arithmetic": ArithmeticPairs("val", size=500, lowest_digit_first=True)},
        tokenizer=options.model,
        batch_size=64,
        val_batch_size=250,
        max_length=32,
    )
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
        logger=CSVLogger(options.out, name=options.method, version=""),
        callbacks=[RunProgress(), HFExport(str(Path(options.out) / options.method / "hf"))],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    if trainer.is_global_zero:
        accuracy = trainer.callback_metrics["val/accuracy"]
        print(f"{options.method}: held-out pairs the right way round after {trainer.global_step} steps: {accuracy:.3f}")


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
