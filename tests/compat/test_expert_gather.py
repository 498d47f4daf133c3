"""Experts that gather the tokens of all ranks: the numbers of one process, whatever number of tokens each rank has."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_megatron_rl.models.layers.moe import MoESettings
from tests.distributed import WorkerError, WorkerPool
from tests.modules.test_moe import BOTH_LOSSES, LAYOUTS, MOE_METRICS, R2, assert_same_rollouts, grpo, sft
from tests.selection import by_default
from tests.strategy.test_megatron import RELATIVE, assert_same_run
from tests.training import Run

GATHER = {"moe_token_dispatcher_type": "allgather"}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SPLIT = by_default(["ep2", "tp2_sp_ep2_etp1"], ["ep2", "tp2_sp_ep2_etp1", "pp2_ep2", "cp2_ep2", "ep2_cp2"])


@pytest.fixture(scope="module")
def reference(worker_pool: WorkerPool, qwen3_moe_dir: Path) -> Run:
    return sft(worker_pool, qwen3_moe_dir, moe=BOTH_LOSSES)[0]


@pytest.mark.parametrize("layout", SPLIT)
def test_training_gives_the_numbers_of_one_process(worker_pool, qwen3_moe_dir, reference, layout):
    """Each sequence is a micro-batch of another length, so the replicas of ep2, pp2_ep2 and ep2_cp2 pad them."""
    run = sft(worker_pool, qwen3_moe_dir, layout, moe=BOTH_LOSSES, model_config=GATHER)[0]
    assert_same_run(run, reference)
    for mine, theirs in zip(run.steps, reference.steps, strict=True):
        for name in MOE_METRICS:
            assert mine[name] == pytest.approx(theirs[name], rel=RELATIVE), name
