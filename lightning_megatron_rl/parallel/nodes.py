"""A run on several hosts: its settings, and what of them is refused by arithmetic before anybody is waited for."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.utilities.ranges import POSITIVE, Range, check_ranges

_RANGES = {
    "rendezvous_timeout_s": POSITIVE.called("seconds to wait for the ranks of all hosts"),
    "lost_after_s": Range(least=4, note="seconds without an answer after which a host counts as lost"),
}


@dataclass(frozen=True)
class NodeSettings:
    """How the ranks of several hosts meet and watch each other; on one host nothing of it is used.

    Args:
        tensor_parallel_across_nodes: Allow tensor-parallel groups with ranks on several hosts, which exchange
            activations four times in every layer. For hosts that share NVLink.
        allow_different_hosts: Only warn of hosts whose package versions differ.
        rendezvous_timeout_s: How long to wait until every rank has come; the error names those that have not. # seconds
        lost_after_s: A host that has not answered for so long (dead, or its network is cut) ends the run on all others.
            # seconds

    Raises:
        ValueError: A time is outside its range.
    """

    tensor_parallel_across_nodes: bool = False
    allow_different_hosts: bool = False
    rendezvous_timeout_s: float = 300.0
    lost_after_s: float = 16.0

    def __post_init__(self) -> None:
        check_ranges(_RANGES, vars(self), "nodes.")


def check_nodes(layout: ParallelLayout, devices: int, num_nodes: int, settings: NodeSettings) -> None:
    """Refuse tensor-parallel groups that would span hosts.

    Megatron numbers the ranks of a tensor-parallel group one after the other, a host's ranks are numbered so, too: the
    groups stay within hosts if their size divides the ranks of a host.

    Args:
        layout: Of the run.
        devices: Ranks of each host.
        num_nodes: Number of hosts.
        settings: May allow it.

    Raises:
        ValueError: With the arithmetic, and a layout that works.
    """
    if num_nodes == 1 or settings.tensor_parallel_across_nodes:
        return
    sizes = {
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "expert_tensor_parallel_size": layout.expert_tensor_parallel_size or 1,
    }
    for name, size in sizes.items():
        if devices % size == 0:
            continue
        first = next(start for start in range(0, num_nodes * devices, size) if spans(start, size, devices))
        within = max(part for part in range(1, size + 1) if devices % part == 0 and size % part == 0)
        advice = (
            f"{name}={within} with pipeline_model_parallel_size={layout.pipeline_model_parallel_size * size // within}"
            if size % within == 0 and name.startswith("tensor")
            else f"{name}={within}"
        )
        raise ValueError(
            f"{name}={size} on {num_nodes} nodes of {devices} rank(s) each: {devices} is no multiple of {size}, so that"
            f" the group of ranks {first} to {first + size - 1} spans nodes {first // devices} and"
            f" {(first + size - 1) // devices}, and its all-reduces in every layer go over the network. Split the model"
            f" across nodes by pipeline, experts or data: for example {advice}. If these nodes share NVLink, allow it:"
            " MegatronStrategy(nodes=NodeSettings(tensor_parallel_across_nodes=True))."
        )


def spans(start: int, size: int, devices: int) -> bool:
    """Whether ranks `start` to `start + size - 1` are on more than one host with `devices` ranks each."""
    return start // devices != (start + size - 1) // devices


def check_launcher(devices: int, num_nodes: int, environment: Mapping[str, str]) -> None:
    """Refuse a Trainer that contradicts what torchrun or SLURM has started.

    Args:
        devices: The Trainer's, of each host.
        num_nodes: The Trainer's.
        environment: This process's.

    Raises:
        ValueError: Names both numbers, and the setting of either side.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        launcher, option = "torchrun", "--nproc-per-node"
        ranks, hosts = environment.get("LOCAL_WORLD_SIZE"), environment.get("GROUP_WORLD_SIZE")
    elif "SLURM_PROCID" in environment and "SLURM_NNODES" in environment:
        launcher, option = "srun", "--ntasks-per-node"
        ranks, hosts = environment.get("SLURM_NTASKS_PER_NODE"), environment.get("SLURM_NNODES")
    else:
        return
    if hosts is not None and hosts.isdecimal() and int(hosts) != num_nodes:
        raise ValueError(
            f"Trainer(num_nodes={num_nodes}), but {launcher} has started {hosts} node(s): set num_nodes={hosts}, or"
            f" start {launcher} with --nnodes {num_nodes}."
        )
    if ranks is not None and ranks.isdecimal() and int(ranks) != devices:
        raise ValueError(
            f"Trainer(devices={devices}), but {launcher} has started {ranks} rank(s) on this node: every node has the"
            f" same number of ranks, {num_nodes} x {devices} = {num_nodes * devices}. Set devices={ranks} on all nodes,"
            f" or start {launcher} with {option} {devices} on each."
        )
