"""Several hosts: what is refused by arithmetic."""

import pytest

from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.parallel.nodes import NodeSettings, check_launcher, check_nodes


def layout(tp: int, **sizes: int) -> ParallelLayout:
    return ParallelLayout(tensor_model_parallel_size=tp, **sizes)


@pytest.mark.parametrize(("tp", "devices", "nodes"), [(1, 1, 2), (2, 4, 2), (4, 4, 8), (8, 2, 1)])
def test_tensor_parallel_groups_within_nodes_are_accepted(tp, devices, nodes):
    check_nodes(layout(tp), devices, nodes, NodeSettings())


@pytest.mark.parametrize(
    ("tp", "devices", "words"),
    [
        (4, 2, "ranks 0 to 3 spans nodes 0 and 1.*tensor_model_parallel_size=2 with pipeline_model_parallel_size=2"),
        (2, 1, "1 is no multiple of 2.*tensor_model_parallel_size=1 with pipeline_model_parallel_size=2"),
        (2, 3, "ranks 2 to 3 spans nodes 0 and 1"),
    ],
)
def test_tensor_parallel_groups_over_nodes_are_refused(tp, devices, words):
    with pytest.raises(ValueError, match=words):
        check_nodes(layout(tp), devices, 4, NodeSettings())
    check_nodes(layout(tp), devices, 4, NodeSettings(tensor_parallel_across_nodes=True))


def test_expert_tensor_parallel_groups_count_as_well():
    with pytest.raises(ValueError, match=r"expert_tensor_parallel_size=4 on 2 nodes of 2 rank"):
        check_nodes(layout(2, expert_tensor_parallel_size=4), 2, 2, NodeSettings())


TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
SLURM = {"SLURM_PROCID": "0", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "2"}


@pytest.mark.parametrize("environment", [TORCHRUN, SLURM, {}])
def test_launcher_that_agrees_is_accepted(environment):
    check_launcher(2, 2, environment)


@pytest.mark.parametrize(
    ("devices", "nodes", "environment", "words"),
    [
        (2, 4, TORCHRUN, "num_nodes=4.*torchrun has started 2 node"),
        (4, 1, TORCHRUN, "num_nodes=1.*torchrun has started 2 node"),
        (1, 2, TORCHRUN, "devices=1.*torchrun has started 2 rank.* --nproc-per-node 1"),
        (2, 4, SLURM, "num_nodes=4.*srun has started 2 node"),
        (4, 2, SLURM, "devices=4.*srun has started 2 rank.*2 x 4 = 8.*--ntasks-per-node 4"),
    ],
)
def test_launcher_that_contradicts_is_named(devices, nodes, environment, words):
    with pytest.raises(ValueError, match=words):
        check_launcher(devices, nodes, environment)


@pytest.mark.parametrize("setting", [{"lost_after_s": 1}, {"rendezvous_timeout_s": 0}])
def test_times_have_ranges(setting):
    with pytest.raises(ValueError, match=r"nodes\."):
        NodeSettings(**setting)
