"""Data sets that recipes name: how their columns map, and rows of the same columns for runs without a hub."""

import difflib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Dataset:
    """A data set of the hub.

    Args:
        path: Its hub name.
        source: What `data.train` says of it, beside the path.
        prompts: Settings of a `PromptDataModule` that map its columns, each with its reason; empty: it has no answers.
        sequences: The same of an `SFTDataModule`; empty: its answers are no responses to learn from.
        rows: Rows of the same columns, made up.
    """

    path: str
    source: dict[str, Any]
    prompts: dict[str, tuple[Any, str]]
    sequences: dict[str, tuple[Any, str]]
    rows: tuple[dict[str, Any], ...]


GSM8K = Dataset(
    "openai/gsm8k",
    {"name": "main", "split": "train"},
    prompts={
        "prompt_column": ("question", "the data set's name for it"),
        "answer_column": ("answer", "what follows #### in its last line is the reference"),
    },
    sequences={
        "prompt_column": ("question", "the data set's name for it"),
        "completion_column": ("answer", "worked solutions that end with #### and the number"),
    },
    rows=(
        {"question": "A box has 3 pens. How many pens have 4 boxes?", "answer": "4 * 3 = <<4*3=12>>12\n#### 12"},
        {"question": "Ann has 9 coins and gives 2 away. How many are left?", "answer": "9 - 2 = <<9-2=7>>7\n#### 7"},
    ),
)
MATH_500 = Dataset(
    "HuggingFaceH4/MATH-500",
    {"split": "test"},
    prompts={
        "prompt_column": ("problem", "the data set's name for it"),
        "answer_column": ("answer", "the final answer alone"),
    },
    sequences={
        "prompt_column": ("problem", "the data set's name for it"),
        "completion_column": ("solution", "worked solutions with a boxed answer"),
    },
    rows=(
        {
            "problem": "What is $2 + 3$?",
            "solution": "It is $\\boxed{5}$.",
            "answer": "5",
            "subject": "Prealgebra",
            "level": 1,
            "unique_id": "test/prealgebra/1.json",
        },
        {
            "problem": "Simplify $\\frac{2}{4}$.",
            "solution": "It is $\\boxed{\\frac{1}{2}}$.",
            "answer": "\\frac{1}{2}",
            "subject": "Prealgebra",
            "level": 1,
            "unique_id": "test/prealgebra/2.json",
        },
    ),
)
DAPO = Dataset(
    "open-r1/DAPO-Math-17k-Processed",
    {"name": "en", "split": "train"},
    prompts={
        "prompt_column": ("prompt", "the problem alone, without the instruction of the original rows"),
        "answer_column": ("solution", "the final answer alone, whatever the column is called"),
    },
    sequences={},
    rows=tuple(
        {
            "prompt": prompt,
            "solution": answer,
            "data_source": "math_dapo",
            "source_prompt": [{"role": "user", "content": f"Solve the following math problem. {prompt}"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"row-{answer}"},
        }
        for prompt, answer in (("What is 7 times 6?", "42"), ("What is the sum of 1, 2 and 31?", "34"))
    ),
)
ULTRACHAT = Dataset(
    "HuggingFaceH4/ultrachat_200k",
    {"split": "train_sft"},
    prompts={},
    sequences={"messages_column": ("messages", "whole conversations, whose assistant turns are targets")},
    rows=tuple(
        {
            "prompt": prompt,
            "prompt_id": str(number),
            "messages": [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": "Yes."},
                {"role": "user", "content": "Thanks."},
                {"role": "assistant", "content": "You are welcome."},
            ],
        }
        for number, prompt in enumerate(("Is water wet?", "Do birds fly?"))
    ),
)
DATASETS = {dataset.path: dataset for dataset in (GSM8K, MATH_500, DAPO, ULTRACHAT)}
_SHORT = {"gsm8k": GSM8K, "math-500": MATH_500, "dapo-math-17k": DAPO, "ultrachat-200k": ULTRACHAT}


def find_dataset(name: str) -> Dataset:
    """Return a data set by its hub name or short name.

    Raises:
        ValueError: It is none of those that recipes know, with the nearest.
    """
    found = DATASETS.get(name) or _SHORT.get(name.lower())
    if found is not None:
        return found
    near = difflib.get_close_matches(name.lower(), [*_SHORT, *DATASETS], n=2, cutoff=0.4)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise ValueError(
        f"unknown data set {name!r}{hint}; known are {', '.join(_SHORT)}. For your own write a recipe for one of these,"
        " and change `data.train` and its columns (docs/data.md)"
    )
