"""A rendezvous that cannot complete names who is missing; what needs several hosts is in tests/cluster."""

import socket
import time
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest
import torch

from lightning_megatron_rl.parallel.meeting import Place, _connect, meet
from lightning_megatron_rl.parallel.nodes import NodeSettings
from tests.distributed import free_port

QUICK = NodeSettings(rendezvous_timeout_s=1.0)


def come(rank: int, address: str = "127.0.0.1", port: int | None = None) -> None:
    place = Place(rank, rank % 2, 4, 2, address, port or free_port(), served=False)
    meet(place, torch.device("cpu"), QUICK, [], timedelta(seconds=5))


def test_missing_ranks_are_named():
    words = (
        r"only 1 of 4 ranks have come to rank 0 on host \S+ within 1 s\. Missing: rank 1 \(node 0, local rank 1\),"
        r" rank 2 \(node 1, local rank 0\), rank 3 \(node 1, local rank 1\); there: \S+\. .*rendezvous_timeout_s"
    )
    with pytest.raises(RuntimeError, match=words):
        come(0)


def test_host_that_does_not_answer_is_named():
    with pytest.raises(RuntimeError, match=r"rank 2 on host \S+ cannot join its run: nobody answers at 127\.0\.0\.1:"):
        come(2)


def test_name_that_does_not_resolve_is_named():
    words = r"rank 2 on host \S+ cannot join its run: the name 'no-such-host.invalid' of rank 0's host does not resolve"
    with pytest.raises(RuntimeError, match=words):
        come(2, "no-such-host.invalid")


def test_hosts_with_ipv6_alone_meet():
    """Rank 0 listened on IPv4, and the others were told that it had not started."""
    if "::1" not in {found.address for addresses in psutil.net_if_addrs().values() for found in addresses}:
        pytest.skip("this machine has no IPv6")
    here = Place(0, 0, 2, 1, "::1", free_port(), served=False)
    first = _connect(here, time.monotonic() + 5, timedelta(seconds=5))
    other = _connect(replace(here, rank=1), time.monotonic() + 5, timedelta(seconds=5))
    first.set("word", "of rank 0")
    assert other.get("word") == b"of rank 0"


def test_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"cannot listen at the rendezvous port of this run.*:{port} "):
            come(0, "127.0.0.1", port)
