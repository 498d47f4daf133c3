"""Every recipe parses, fits the GPUs of its header, has a reason beside each setting; its data set maps."""

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.data.sft import SFTDataModule
from lightning_megatron_rl.models.hf.size import config_shapes, model_size
from lightning_megatron_rl.models.published import read_config, recipe_names, stated_parameters
from lightning_megatron_rl.recipes.datasets import DAPO, DATASETS, GSM8K, MATH_500, ULTRACHAT, Dataset, find_dataset
from lightning_megatron_rl.recipes.shrink import shrink_layout, write_model
from lightning_megatron_rl.recipes.text import MARK, METHODS
from lightning_megatron_rl.rewards import math_equal
from lightning_megatron_rl.sample import Sample
from tests.command_line import ROOT
from tests.selection import by_default

sys.path.insert(0, str(ROOT / "scripts"))
recipes: Any = importlib.import_module("write_recipes")
tables: Any = importlib.import_module("recipe_table")
FILES = recipes.recipe_files()
QUICK = [path for path in FILES if path.parent.name in ("qwen3-0.6b", "deepseek-v3")]


def test_every_model_has_every_recipe():
    names = {path.relative_to(recipes.RECIPES).as_posix() for path in FILES}
    assert names == {f"{model}/{method}.yaml" for model in recipe_names() for method in METHODS}
    assert len(FILES) == 51


@pytest.mark.parametrize("path", by_default(QUICK, FILES), ids=tables.name_of)
def test_header_is_the_plan_and_it_fits(path: Path):
    """Parsed by the real command line; the header is what `scripts/write_recipes.py` would write."""
    run = recipes.plan_of(path)
    run.require()
    text = path.read_text()
    assert recipes.with_header(text, run) == text, "run scripts/write_recipes.py"


def test_guide_says_what_the_plan_says():
    """The recipe's header is compared with the planner above."""
    (memory, seconds) = re.findall(r"expects (.* GiB) and (\d+ s) per step", (ROOT / "docs" / "gsm8k.md").read_text())[
        0
    ]
    assert f"{MARK}{memory} per GPU; {seconds} per step" in (recipes.RECIPES / "qwen3-0.6b" / "grpo.yaml").read_text()


@pytest.mark.parametrize("path", FILES, ids=tables.name_of)
def test_every_setting_has_its_reason(path: Path):
    text = path.read_text()
    assert isinstance(yaml.safe_load(text), dict)
    for line in text.splitlines():
        if line.startswith("#") or re.fullmatch(r"\s*(- )?[\w.]+:", line):
            continue
        assert re.search(r"  # \S", line), f"{path.name}: {line!r} has no reason"
    assert text.count(MARK) == 3
    used = yaml.safe_load(text)["data"]["init_args"]
    assert used["train"]["path"] in DATASETS


@pytest.mark.parametrize("short", recipe_names())
def test_sizes_of_published_models_are_the_stated_ones(short: str):
    config = read_config(short)
    assert model_size(config, config_shapes(config)).parameters == stated_parameters(short)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.tiny_models import tiny_config

    raw = {**tiny_config("llama").to_dict(), "vocab_size": 320}
    return str(write_model(tmp_path_factory.mktemp("bytes") / "model", raw, {"enable_thinking": False}))


def written(dataset: Dataset, directory: Path) -> str:
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in dataset.rows))
    return str(file)


@pytest.mark.usefixtures("math_worker")
@pytest.mark.parametrize("dataset", [GSM8K, MATH_500, DAPO], ids=lambda dataset: dataset.path)
def test_columns_of_prompts_map_and_the_reward_knows_the_answers(dataset: Dataset, tokenizer: str, tmp_path: Path):
    columns = {name: value for name, (value, _) in dataset.prompts.items()}
    data = PromptDataModule(written(dataset, tmp_path), tokenizer, batch_size=2, apply_chat_template=True, **columns)
    data.setup("fit")
    prompts = data.train_items
    assert [prompt.text for prompt in prompts] == [
        f"user: {row[columns['prompt_column']]}<eos>assistant: " for row in dataset.rows
    ]
    right = [Sample(p, [1], [0.0], f"So it is \\boxed{{{p.answer}}}.", "stop", 0) for p in prompts]
    wrong = [Sample(p, [1], [0.0], "So it is \\boxed{-1}.", "stop", 0) for p in prompts]
    assert math_equal(right + wrong) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("dataset", [GSM8K, MATH_500, ULTRACHAT], ids=lambda dataset: dataset.path)
def test_columns_of_sequences_map(dataset: Dataset, tokenizer: str, tmp_path: Path):
    columns = {name: value for name, (value, _) in dataset.sequences.items()}
    chat = {} if "messages_column" in columns else {"apply_chat_template": True}
    data = SFTDataModule(written(dataset, tmp_path), tokenizer, batch_size=2, max_length=512, **columns, **chat)
    data.setup("fit")
    assert len(data.train_items) == 2
    assert all(0 < int(item.loss_mask.sum()) < len(item) for item in data.train_items)


def test_unknown_data_set_names_the_nearest():
    assert find_dataset("gsm8k") is GSM8K
    with pytest.raises(ValueError, match=r"unknown data set 'gsm8'; nearest: gsm8k"):
        find_dataset("gsm8")


@pytest.mark.parametrize(
    ("layout", "world", "small", "ranks"),
    [
        ({}, 1, (1, 1, 1, 1), (1, 1)),
        ({}, 8, (1, 1, 1, 1), (2, 2)),
        ({"tensor_model_parallel_size": 8}, 32, (2, 1, 1, 1), (4, 2)),
        ({"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 16}, 128, (2, 2, 1, 1), (4, 1)),
        ({"expert_model_parallel_size": 8}, 8, (1, 1, 1, 2), (2, 2)),
        (
            {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1},
            8,
            (2, 1, 1, 2),
            (4, 2),
        ),
        (
            {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 2, "context_parallel_size": 4},
            64,
            (2, 2, 2, 1),
            (8, 1),
        ),
    ],
)
def test_smallest_faithful_layout(layout, world, small, ranks):
    strategy = dict(layout)
    assert shrink_layout(strategy, world) == ranks
    names = ("tensor", "pipeline", "context", "expert")
    sizes = [
        strategy[f"{name}_model_parallel_size" if name != "context" else "context_parallel_size"] for name in names
    ]
    assert tuple(sizes) == small


def test_table_of_the_document_is_that_of_the_results():
    results = json.loads(tables.RESULTS.read_text())
    document = tables.DOCUMENT.read_text()
    assert tables.table(results) in document, "run scripts/recipe_table.py --table"
    assert set(results) <= {tables.name_of(path) for path in FILES}
