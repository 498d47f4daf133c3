"""Supervised fine-tuning from a script, with batches of a fixed number of tokens, on two processes without a GPU.

Usage, with the untrained model that ``make demo`` starts from (``python examples/demo/build_model.py runs/model``)::

    python examples/sft_script.py --model runs/model

The checkpoint starts GRPO, PPO or DPO without a conversion, in any layout: ``GRPOModule(init_from=CHECKPOINT, ...)``.
"""

import argparse
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from megatron.core.optimizer import OptimizerConfig

from lightning_megatron_rl import MegatronStrategy, RunProgress, SFTDataModule, SFTModule, TrainingSettings
from lightning_megatron_rl.data.arithmetic import ArithmeticRows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/model", help="directory or hub name of the model")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=3500, help="problems of the training set")
    parser.add_argument("--devices", type=int, default=2, help="processes, each with a replica of the model")
    parser.add_argument("--out", default="runs/sft_script", help="directory of metrics and checkpoints")
    options = parser.parse_args()

    L.seed_everything(1234)
    checkpoints = ModelCheckpoint(
        Path(options.out) / "checkpoints", filename="best", monitor="val/loss", save_last="link"
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=MegatronStrategy(timeout_s=600),
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=CSVLogger(options.out, name="", version=""),
        callbacks=[RunProgress(), checkpoints],
        enable_model_summary=False,
    )
    module = SFTModule(
        model=options.model,
        train=TrainingSettings(optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.0, adam_beta2=0.98)),
    )
    data = SFTDataModule(
        train=ArithmeticRows("train", size=options.rows, lowest_digit_first=True),
        val={"arithmetic": ArithmeticRows("val", size=500, lowest_digit_first=True)},
        tokenizer=options.model,
        completion_column="answer",
        max_tokens_per_batch=2048,  # as many problems as have so many tokens together, whatever their lengths
        batch_size=512,  # at most
        val_batch_size=250,
        max_length=32,
    )
    trainer.fit(module, data)
    if trainer.is_global_zero:
        loss, perplexity = (trainer.callback_metrics[f"val/arithmetic/{name}"] for name in ("loss", "perplexity"))
        print(f"held-out loss after {trainer.global_step} steps: {loss:.3f}, perplexity {perplexity:.3f}")
        print(f"to go on from: init_from={checkpoints.best_model_path}")


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
