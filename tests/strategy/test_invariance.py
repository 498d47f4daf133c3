"""One frozen batch, every layout, every number of micro-batches: one loss, one gradient norm, one set of weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.data.planning import plan_microbatches
from tests.strategy.test_megatron import LAYOUTS, assert_same_run
from tests.tiny_models import SPECIAL_TOKENS, VOCAB_SIZE
from tests.training import Run, fit_sft

LENGTHS = (40, 38, 2, 17, 29, 5, 37, 11)  # of each of two batches
BUDGETS = {184: 1, 96: 2, 72: 3, 40: 5}  # max_tokens_per_microbatch: micro-batches of one process


def ragged_batches() -> list[TokenSequence]:
    """Two batches; the first replica's sequences have no target in the first batch, one of the other's has a single."""
    generator = torch.Generator().manual_seed(11)
    sequences = []
    for batch in range(2):
        for index, length in enumerate(LENGTHS):
            tokens = torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (length,), generator=generator)
            mask = torch.rand(length, generator=generator) < 0.7
            mask[0] = False
            if batch == 0 and index % 2 == 0:
                mask[:] = False
            if index == 1:
                mask = torch.arange(length) == length - 1
            sequences.append(TokenSequence(tokens, mask, {}))
    return sequences


def fit_with_budgets(model: Path, strategy: dict[str, Any], world_size: int, budgets: list[int]) -> list[Run]:
    """Two steps from the same weights with each budget."""
    return [
        fit_sft(
            model,
            strategy,
            world_size,
            batch_size=len(LENGTHS),
            sequences=ragged_batches(),
            module={"max_tokens_per_microbatch": budget},
        )
        for budget in budgets
    ]


@pytest.fixture(scope="module")
def reference(worker_pool, qwen3_dir) -> Run:
    return worker_pool.run(fit_with_budgets, qwen3_dir, {}, 1, [184], world_size=1, init_process_group=False)[0][0]


def test_the_budgets_split_the_batch():
    for budget, parts in BUDGETS.items():
        assert len(plan_microbatches(LENGTHS, budget)) == parts


# eight processes take minutes on two cores
CASES = [pytest.param(name, marks=[pytest.mark.slow] * (LAYOUTS[name][0] > 4)) for name in LAYOUTS]


@pytest.mark.deadline(300)
@pytest.mark.parametrize("layout", ["one", *CASES])
def test_no_layout_and_no_split_changes_a_number(worker_pool, qwen3_dir, reference, layout):
    """Loss, gradient norm and weights after two steps, to 1e-5 relative: fp32 sums in another order."""
    world_size, strategy = LAYOUTS.get(layout, (1, {}))
    ranks = worker_pool.run(
        fit_with_budgets,
        qwen3_dir,
        strategy,
        world_size,
        list(BUDGETS),
        world_size=world_size,
        init_process_group=False,
        timeout=280,
    )
    for runs in ranks:
        for run, first in zip(runs, ranks[0], strict=True):
            named = [{name: step[name] for name in ("policy/loss", "policy/grad_norm")} for step in run.steps]
            assert named == [{name: step[name] for name in named[0]} for step in first.steps], "ranks differ"
    for run in ranks[0]:
        assert_same_run(run, reference)


UNEVEN = [
    {"num_layers_in_first_pipeline_stage": 1},
    {"num_layers_in_last_pipeline_stage": 1},
    {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
]


def fit_uneven(model: Path, strategy: dict[str, Any], world_size: int) -> list[Run]:
    """Two steps with each uneven split of the four layers."""
    options = {"batch_size": len(LENGTHS), "sequences": ragged_batches()}
    return [
        fit_sft(
            model,
            strategy,
            world_size,
            module={"max_tokens_per_microbatch": 96, "model_config": split},
            **options,
        )
        for split in UNEVEN
    ]


def test_uneven_pipeline_stages_change_no_number(worker_pool, qwen3_dir, reference):
    world_size, strategy = LAYOUTS["pp2"]
    runs = worker_pool.run(
        fit_uneven, qwen3_dir, strategy, world_size, world_size=world_size, init_process_group=False
    )[0]
    for run in runs:
        assert_same_run(run, reference)
