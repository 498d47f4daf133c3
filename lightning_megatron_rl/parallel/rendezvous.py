"""Where processes of one machine meet: a store that other machines cannot reach."""

import socket
from datetime import timedelta

from torch import distributed as dist

LOOPBACK = "127.0.0.1"


def local_store(rank: int, world_size: int, port: int, timeout: timedelta) -> dist.Store:
    """Return the store of processes on this machine, for `init_process_group(store=...)`.

    torch's own rendezvous listens on all interfaces, and answers whoever connects. One process needs no port at all.

    Args:
        rank: Of this process; 0 serves the others.
        world_size: Number of processes.
        port: Where they meet, on the loopback interface.
        timeout: How long to wait for the others.

    Raises:
        OSError: On rank 0: the port is in use.
    """
    if world_size == 1:
        return dist.HashStore()
    if rank > 0:
        return dist.TCPStore(LOOPBACK, port, world_size, is_master=False, timeout=timeout)
    descriptor = socket.create_server((LOOPBACK, port)).detach()  # the store closes it
    return dist.TCPStore(LOOPBACK, port, world_size, is_master=True, timeout=timeout, master_listen_fd=descriptor)
