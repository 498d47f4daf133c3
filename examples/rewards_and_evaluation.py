"""Several rewards with a deadline, and an evaluation on two sets: greedy accuracy, pass@k and majority vote.

Usage, after ``make demo`` has left a model to evaluate::

    python examples/rewards_and_evaluation.py
"""

import argparse

import lightning as L

from lightning_megatron_rl import (
    GRPOModule,
    MegatronStrategy,
    PromptDataModule,
    RolloutSamples,
    RunProgress,
    Sample,
    VLLMEngine,
)
from lightning_megatron_rl.data.arithmetic import ArithmeticRows
from lightning_megatron_rl.modules.evaluation import EvaluationSettings
from lightning_megatron_rl.rewards import ExactMatch, FormatReward, GuardedReward, LengthPenalty
from lightning_megatron_rl.rollout.protocol import SamplingParams


def digits_right(samples: list[Sample]) -> list[float]:
    """Share of the answer's digits that are in their place; raises where there are none, which costs that sample -1."""
    return [
        sum(a == b for a, b in zip(sample.response.strip(), str(sample.prompt.answer), strict=False))
        / len(sample.response.strip())
        for sample in samples
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/sft/hf/last", help="directory or hub name of the model")
    parser.add_argument("--prompts", type=int, default=200, help="prompts of each set")
    parser.add_argument("--out", default="runs/rewards_and_evaluation", help="directory of the samples")
    options = parser.parse_args()

    L.seed_everything(1234)
    module = GRPOModule(
        model=options.model,
        rewards=[
            ExactMatch(),
            FormatReward(r"\d+"),
            LengthPenalty(free_tokens=4, max_tokens=6),
            GuardedReward(digits_right, deadline_s=10.0, default=-1.0),
        ],
        reward_weights=[1.0, 0.1, 0.1, 0.0],  # the last one is only looked at
        sampling=SamplingParams(max_tokens=6),
        evaluation=EvaluationSettings(num_generations=8, right_above=1.0),  # more than the form can give
        engine=VLLMEngine(max_model_len=64, kv_cache_memory_gb=0.25),
    )
    data = PromptDataModule(
        train=ArithmeticRows("train", size=100, lowest_digit_first=True),
        val={
            "seen": ArithmeticRows("train", size=options.prompts, lowest_digit_first=True),
            "unseen": ArithmeticRows("val", size=options.prompts, lowest_digit_first=True),
        },
        tokenizer=options.model,
        batch_size=8,
        val_batch_size=100,
        max_prompt_length=16,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MegatronStrategy(),
        logger=False,
        callbacks=[RunProgress(), RolloutSamples(dirpath=options.out)],
    )
    trainer.validate(module, data, verbose=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for dataset in data.val_names:
        for name in ("mean_at_1", "mean_at_8", "pass_at_1", "pass_at_8", "maj_at_8"):
            key = f"val/{dataset}/{name}"
            print(f"{key:<24} {metrics[key]:.3f}  [{metrics[key + '_low']:.3f}, {metrics[key + '_high']:.3f}]")


if __name__ == "__main__":
    main()
