"""Rewards and a callback of your own, for scripts and YAML alike; as a script it trains with them for a few steps.

Usage, after ``make demo`` has left a model to start from::

    python examples/custom_callback_and_reward.py

From YAML they are named by their import path. With this overlay in ``custom.yaml``:

.. code-block:: yaml

    trainer:
      callbacks+:                      # "+" adds to the list of the files before
        - class_path: custom_callback_and_reward.LengthHistogram
          init_args: {every_n_steps: 10}
    model:
      init_args:
        rewards:
          - custom_callback_and_reward.last_digit
          - class_path: custom_callback_and_reward.Brevity
            init_args: {budget: 4}
        reward_weights: [1.0, 0.1]

the command is::

    PYTHONPATH=examples lightning-megatron-rl fit --config configs/demo/grpo.yaml --config custom.yaml
"""

import argparse
from collections import Counter
from typing import Any

import lightning as L
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info

from lightning_megatron_rl import GRPOModule, MegatronStrategy, PromptDataModule, RunProgress, Sample, VLLMEngine
from lightning_megatron_rl.data.arithmetic import ArithmeticRows
from lightning_megatron_rl.rollout.protocol import SamplingParams


def last_digit(samples: list[Sample]) -> list[float]:
    """Reward 1 for the right sum, 0.3 if only its last digit is right; logged as ``reward/last_digit``."""

    def score(response: str, answer: str) -> float:
        return 1.0 if response == answer else 0.3 if response[-1:] == answer[-1:] else 0.0

    return [score(sample.response.strip(), str(sample.prompt.answer)) for sample in samples]


class Brevity:
    """Reward 1 up to `budget` tokens and less beyond; a class has settings, a function has none.

    Args:
        budget: Length that costs nothing, the end-of-sequence token included. # [tokens]
    """

    def __init__(self, budget: int = 4) -> None:
        self.budget = budget

    def __call__(self, samples: list[Sample]) -> list[float]:
        """Return one number per sample."""
        return [min(1.0, self.budget / len(sample.response_ids)) for sample in samples]


class LengthHistogram(Callback):
    """Print how long the responses of a rollout were.

    Args:
        every_n_steps: Steps between two prints.
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        self.every_n_steps = every_n_steps

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % self.every_n_steps:
            return
        lengths = Counter(len(sample.response_ids) for sample in pl_module.last_rollout.samples)
        bars = "\n".join(f"{length:4d} {'#' * count} {count}" for length, count in sorted(lengths.items()))
        rank_zero_info(f"response lengths of step {trainer.global_step} (tokens, samples of one replica):\n{bars}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/sft/hf/last", help="directory or hub name of the model")
    parser.add_argument("--steps", type=int, default=5, help="rollouts")
    options = parser.parse_args()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MegatronStrategy(),
        max_steps=options.steps,
        callbacks=[RunProgress(), LengthHistogram()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    module = GRPOModule(
        model=options.model,
        rewards=[last_digit, Brevity(budget=4)],
        reward_weights=[1.0, 0.1],
        num_generations=4,
        sampling=SamplingParams(max_tokens=6),
        engine=VLLMEngine(max_model_len=64, kv_cache_memory_gb=0.25),
    )
    data = PromptDataModule(
        train=ArithmeticRows("train", size=200, lowest_digit_first=True),
        tokenizer=options.model,
        batch_size=8,
        max_prompt_length=16,
    )
    trainer.fit(module, data)


if __name__ == "__main__":
    main()
