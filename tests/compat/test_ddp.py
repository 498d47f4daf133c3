"""What a run has built goes when the run's objects go, without a word from anybody."""

import gc
from pathlib import Path
from typing import Any

import pytest

from tests.training import fit_sft


def what_is_left(model: Path, sharded: bool) -> list[str]:
    """Fit, drop everything, and name the large things that are still there."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import MegatronOptimizer

    fit_sft(model, {"use_distributed_optimizer": sharded}, 1, steps=1)
    gc.collect()
    kinds: Any = (DistributedDataParallel, _ParamAndGradBuffer, GPTModel, MegatronOptimizer)
    return [type(found).__name__ for found in gc.get_objects() if issubclass(type(found), kinds)]


@pytest.mark.parametrize("sharded", [True, False])
def test_a_run_leaves_no_model_behind(worker_pool, qwen3_dir, sharded):
    """Fails with Megatron's own hooks: a second run in the same process would find less memory."""
    assert worker_pool.run(what_is_left, qwen3_dir, sharded, world_size=1, init_process_group=False) == [[]]
