"""How a rank of a `MegatronStrategy` joins the others: checks, the process group, and the table of hosts."""

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch import distributed as dist

from lightning_megatron_rl.compat.adam import install_adam
from lightning_megatron_rl.compat.cpu import install_cpu_support
from lightning_megatron_rl.compat.gloo import install_shared_gloo
from lightning_megatron_rl.parallel import leader, presence
from lightning_megatron_rl.parallel.hosts import HostFacts, groups_of_rank, host_table
from lightning_megatron_rl.parallel.launching import RankLauncher
from lightning_megatron_rl.parallel.nodes import check_launcher, check_nodes
from lightning_megatron_rl.parallel.rendezvous import join

if TYPE_CHECKING:
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy


def check_ranks(strategy: "MegatronStrategy") -> None:
    """Refuse numbers of ranks and nodes that contradict the layout or the launcher.

    Raises:
        ValueError: With the arithmetic.
    """
    strategy.layout.data_parallel_size(strategy.world_size)
    if strategy.num_nodes > 1 and not dist.is_initialized():
        check_launcher(strategy.num_processes, strategy.num_nodes, os.environ)
    check_nodes(strategy.layout, strategy.num_processes, strategy.num_nodes, strategy.nodes)


def join_run(strategy: "MegatronStrategy") -> list[HostFacts]:
    """Start the default process group; returns facts of all ranks of a run on several hosts."""
    assert strategy.cluster_environment is not None
    device, launcher = strategy.root_device, strategy.launcher
    install_cpu_support(device)
    install_shared_gloo(device)
    install_adam(device)
    return join(
        strategy.cluster_environment,
        strategy.num_processes,
        device,
        timedelta(seconds=strategy.timeout_s),
        launcher.release_port() if isinstance(launcher, RankLauncher) else None,
        strategy.nodes,
        _shared_directories(strategy),
    )


def _shared_directories(strategy: "MegatronStrategy") -> Sequence[Path]:
    """The directories in which all ranks of a fit write checkpoints, as far as they are known before it starts."""
    trainer = strategy.trainer
    if trainer.state.fn != TrainerFn.FITTING:
        return []
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    return sorted({Path(callback.dirpath or trainer.default_root_dir) for callback in callbacks})


def show_hosts(hosts: Sequence[HostFacts]) -> None:
    """Print on rank 0 who is where, and with whom in which group; a collective, nothing if there is one host."""
    if not hosts:
        return
    groups: list[Mapping[str, Sequence[int]] | Any] = [None] * len(hosts)
    dist.all_gather_object(groups, groups_of_rank())
    if dist.get_rank() > 0:
        return
    from rich.console import Console
    from rich.table import Table

    header, *rows = host_table(hosts, groups)
    table = Table(*header, title="hosts: ranks, and the ranks of their groups", title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def watch() -> None:
    """End with the rank that started this one, or with another host's."""
    leader.watch()
    presence.watch()


def rest() -> None:
    """Let every rank leave when it likes."""
    leader.rest()
    presence.rest()
