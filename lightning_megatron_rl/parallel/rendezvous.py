"""Where processes meet: those of one machine at a store that other machines cannot reach, others by `meeting`."""

import atexit
import os
import signal
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from lightning_megatron_rl.parallel.nodes import NodeSettings

if TYPE_CHECKING:  # a sampler's process, which meets the trainer's here, does without Lightning's seconds of import
    from lightning.pytorch.plugins import ClusterEnvironment

    from lightning_megatron_rl.parallel.hosts import HostFacts

LOOPBACK = "127.0.0.1"


def local_store(
    rank: int,
    world_size: int,
    port: int,
    timeout: timedelta,
    bound: socket.socket | None = None,
    address: str = LOOPBACK,
) -> dist.Store:
    """Return the store of processes on this machine, or at one address of it, for `init_process_group(store=...)`.

    torch's own rendezvous listens on all interfaces, and answers whoever connects. One process needs no port at all.

    Args:
        rank: Of this process; 0 serves the others.
        world_size: Number of processes.
        port: Where they meet.
        timeout: How long to wait for the others.
        bound: Of rank 0: a socket that has the port already; the store closes it.
        address: Of rank 0's host; only its interface listens.

    Raises:
        OSError: On rank 0: the port is in use.
    """
    if world_size == 1:
        return dist.HashStore()
    if rank > 0:
        return dist.TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    server = socket.create_server((address, port)) if bound is None else bound
    server.listen()
    descriptor = server.detach()  # the store closes it
    return dist.TCPStore(address, port, world_size, is_master=True, timeout=timeout, master_listen_fd=descriptor)


def join(
    environment: "ClusterEnvironment",
    num_processes: int,
    device: torch.device,
    timeout: timedelta,
    bound: socket.socket | None = None,
    nodes: NodeSettings | None = None,
    shared: Sequence[Path] = (),
) -> "list[HostFacts]":
    """Start this rank's default process group, unless there is one.

    Args:
        environment: Knows the ranks.
        num_processes: Of this machine.
        device: Of this rank.
        timeout: Of the group's collectives, and of waiting for the other ranks of one machine.
        bound: The socket that the run's port was bound with when it was chosen; None where somebody else chose it.
        nodes: How the ranks of several machines meet.
        shared: Directories that these machines must share.

    Returns:
        Facts of all ranks of several machines; nothing if there is only this one, or the group was there.

    Raises:
        RuntimeError: The port is in use; several machines: see `meeting.meet`.
        ValueError: The machines cannot work together.
    """
    if dist.is_initialized():
        return []
    # handlers run in reverse: other hosts hear that this rank ends (`presence`) before its last collectives are awaited
    atexit.unregister(_leave)
    atexit.register(_leave)
    address, port = environment.main_address, environment.main_port
    rank, world_size = environment.global_rank(), environment.world_size()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    served_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    backend = "nccl" if device.type == "cuda" else "gloo"
    hosts: list[HostFacts] = []
    try:
        store = None
        if world_size > num_processes:
            from lightning_megatron_rl.parallel.meeting import Place, meet

            place = Place(rank, environment.local_rank(), world_size, num_processes, address, port, served_by_torchrun)
            store, hosts = meet(place, device, nodes or NodeSettings(), shared, timeout)
        elif not served_by_torchrun:
            store = local_store(rank, world_size, port, timeout, bound)
        # without a device_id: each of Megatron's groups, most of them unused, would get a communicator at
        # once, with 388 MiB of the GPU's memory
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout, store=store)
    except (RuntimeError, OSError) as error:
        if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
            raise
        raise RuntimeError(
            f"the rendezvous port of this run is in use: {address}:{port}. Another run on this machine may hold it:"
            " set MASTER_PORT to another port; if you set it yourself on a single machine, unset MASTER_PORT, so that a"
            f" free one is chosen. Original error: {error}"
        ) from error
    return hosts


def _leave() -> None:
    """End the process group before the interpreter ends, whatever Ctrl-C says.

    NCCL asks for it. Threads of gloo may have the last tensors; where they free them in an interpreter that has ended,
    the process is aborted, and a run that was done has failed (pytorch pull request 179291).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if dist.is_initialized():
        dist.destroy_process_group()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
