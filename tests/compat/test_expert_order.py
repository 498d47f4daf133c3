"""Tokens that no other rank can send are in the order of their experts: they are not sorted again."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.distributed import WorkerPool
from tests.models import workers

SEQUENCES = [[3, 14, 15, 92, 65, 35], [27, 18, 28], [31, 41, 59, 26, 53, 58, 97, 93, 23, 84]]


def sort_all(chunks: Iterable[Any]) -> None:
    """As Megatron does."""


def count_sorts(function: Any, *args: Any, **kwargs: Any) -> tuple[int, Any]:
    """How often tokens of a layer were sorted, and what a function returns."""
    workers.start_megatron()  # Megatron is imported for the CPU before its function is replaced
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import token_dispatcher

    parallel_state.destroy_model_parallel()
    with patch.object(token_dispatcher, "sort_chunks_by_idxs", wraps=token_dispatcher.sort_chunks_by_idxs) as sort:
        result = function(*args, **kwargs)
    return sort.call_count, result


def gradients_twice(directory: str) -> list[tuple[int, dict[str, Tensor]]]:
    """With and without what Megatron sorts."""
    found = [count_sorts(workers.exported_gradients, directory, SEQUENCES, packed=True, tp=1)]
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    with patch("lightning_megatron_rl.models.hf.model.leave_sorted_tokens", sort_all):
        return [*found, count_sorts(workers.exported_gradients, directory, SEQUENCES, packed=True, tp=1)]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3_plain", "gpt_oss"])
def test_gradients_are_the_same_bit_by_bit(worker_pool: WorkerPool, checkpoint, family: str):
    ((num_left, ours), (num_sorted, megatrons)) = worker_pool.run(
        gradients_twice, str(checkpoint(family)), world_size=1
    )[0]
    assert num_left == 0
    assert num_sorted > 0
    assert ours.keys() == megatrons.keys()
    assert all(torch.equal(ours[name], megatrons[name]) for name in ours)
    assert any(".experts." in name and tensor.abs().sum() > 0 for name, tensor in ours.items())


@pytest.mark.parametrize("layout", [{"ep": 2}, {"tp": 2, "ep": 1, "etp": 2}])
def test_what_comes_from_several_ranks_is_sorted(worker_pool: WorkerPool, qwen3_moe_dir: Path, layout: dict[str, int]):
    """That it is sorted right is shown where the models are compared with Transformers."""
    sp = layout.get("tp", 1) > 1
    answers = worker_pool.run(
        count_sorts,
        workers.families_under_layout,
        {"qwen3_moe": str(qwen3_moe_dir)},
        [sequence * 2 for sequence in SEQUENCES],
        sp,
        layout,
        world_size=2,
    )
    assert all(count > 0 for count, _ in answers)
