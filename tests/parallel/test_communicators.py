"""Which process groups a run uses: NCCL takes 388 MiB of an H100 for each, be it of one rank."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_megatron_rl.models.layers.moe import MoESettings
from tests.strategy.test_megatron import LAYOUTS
from tests.training import fit_sft

COLLECTIVES = [
    *("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"),
    *("all_to_all_single", "all_gather_object", "broadcast_object_list", "barrier"),
]
# Megatron's optimizer, gradients, counts of tokens and names of parameters take three; the world is Lightning's
ALWAYS = {
    "default_pg",
    "DATA_PARALLEL_GROUP_WITH_CP",
    "PIPELINE_MODEL_PARALLEL_GROUP",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
}
LAYOUT_GROUPS: dict[str, set[str]] = {
    "single": set(),
    "dp2": set(),
    "tp2_sp": {"TENSOR_MODEL_PARALLEL_GROUP", "REPLICA_GROUP_GLOO"},  # gloo's, on a GPU as well
    "cp2": {"CONTEXT_PARALLEL_GROUP", "REPLICA_GROUP_GLOO"},
}


def groups_used(model: Path, strategy: dict[str, Any], world_size: int, **run: Any) -> set[str]:
    """Names of the groups that a run has collectives in: NCCL's on a GPU, unless they are gloo's by name."""
    used: set[str] = set()

    def note(call: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            groups = [value for value in (*args, kwargs.get("group")) if isinstance(value, dist.ProcessGroup)]
            group = groups[0] if groups else dist.group.WORLD
            used.add(group.group_desc)
            return call(*args, **kwargs)

        return noted

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, note(getattr(dist, name))))
        fit_sft(model, strategy, world_size, **run)
    return used


def test_routers_of_one_rank_use_no_group(worker_pool, qwen3_moe_dir):
    module = {"moe": MoESettings(aux_loss_coeff=0.01)}
    used = worker_pool.run(groups_used, qwen3_moe_dir, {}, 1, module=module, world_size=1, init_process_group=False)[0]
    assert used == ALWAYS


@pytest.mark.parametrize("layout", LAYOUT_GROUPS)
def test_groups_that_nobody_needs_are_not_used(worker_pool, qwen3_dir, layout):
    world_size, strategy = LAYOUTS.get(layout, (1, {}))
    for used in worker_pool.run(
        groups_used, qwen3_dir, strategy, world_size, world_size=world_size, init_process_group=False
    ):
        assert used <= ALWAYS | LAYOUT_GROUPS[layout]
        assert used >= ALWAYS
