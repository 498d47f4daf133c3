"""Process groups on the CPU that share one network device: fewer threads that wake for nothing.

torch gives each gloo group a device of its own, whose thread looks for work a hundred times a second, and two threads
that run its collectives. Megatron's parallel state makes some twenty-five groups, whose threads take some percent of a
core in every process while nothing happens, and get in the way of the computation where there is a core per process.
A group's collectives run in one order anyway, so one thread per group is enough.
"""

import functools
import os
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

_INTERFACES = "GLOO_SOCKET_IFNAME"  # torch's own variable: names, separated by commas
_NEVER_SENT = 2**20  # tag of a message that nobody sends


@functools.cache
def install_shared_gloo(device: torch.device) -> None:
    """Let gloo groups that are made from now on share their devices if `device` is the CPU; later calls do nothing."""
    if device.type != "cpu":
        return
    from torch.distributed import distributed_c10d

    original: Any = distributed_c10d.ProcessGroupGloo
    made: dict[int, list[Any]] = {}  # by process: a fork has no threads

    class ProcessGroupGloo(original):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            shared = made.setdefault(os.getpid(), [])
            if not shared:
                names = [name for name in os.environ.get(_INTERFACES, "").split(",") if name]
                shared.extend(original.create_device(interface=name) for name in names)
                if not names and size == 1:
                    shared.append(original.create_device(hostname="127.0.0.1"))  # nobody else has to reach it
                elif not names:
                    shared.append(original.create_default_device())
            options = original._Options()
            options._devices, options._timeout, options._threads = shared, timeout, len(shared)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    """Return a gloo group outside the default group, whose connections go over one address of this host.

    Args:
        store: Of the group alone.
        rank: Of this process in it.
        size: Number of processes.
        timeout: Of its collectives.
        address: Of this host, as the others reach it.
    """
    group: Any = torch.distributed.ProcessGroupGloo
    options = group._Options()
    options._devices = [group.create_device(hostname=address)]
    options._timeout, options._threads = timeout, 1
    return group(store, rank, size, options)


def close_gloo(group: Any, others: Iterable[int]) -> None:
    """Close all connections of a group at once, also while other threads wait on them; these get a RuntimeError.

    Neither `abort` nor `shutdown` of a gloo group does that. A message that does not come in time does.

    Args:
        group: One of `gloo_group`.
        others: Numbers of other processes in it; the first that is still connected does.
    """
    for other in others:
        with suppress(RuntimeError):
            group.recv([torch.empty(1)], other, _NEVER_SENT).wait(timedelta(milliseconds=1))
