"""One push of weights to the workers of several servers, at the same time and bucket by bucket."""

import asyncio
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from lightning_megatron_rl.rollout.servers.client import LOST, ServerClient
from lightning_megatron_rl.rollout.servers.connections import Connections
from lightning_megatron_rl.weights.placement import Placement, fill_buckets
from lightning_megatron_rl.weights.source import WeightSource
from lightning_megatron_rl.weights.transports.base import total_bytes
from lightning_megatron_rl.weights.transports.network import NetworkSender

MEET_S = 30.0  # for the workers of a server to come to the trainer's group


def meet(connections: Connections, servers: list[ServerClient], timeout_s: float) -> list[ServerClient]:
    """Make a group with the workers of each server that has none with this trainer; returns those that came.

    Args:
        connections: Of the engine.
        servers: That are paused.
        timeout_s: Deadline of each broadcast. # seconds
    """

    def join(server: ServerClient) -> None:
        assert server.about is not None
        if server.met == server.about.instance and server in connections.senders:
            return
        sender = NetworkSender(server.host, server.about.num_workers, min(timeout_s, MEET_S))
        joining = server.call("join_trainer", vars(sender.meeting))
        answer = asyncio.run_coroutine_threadsafe(joining, connections.loop)
        try:
            sender.meet()
        except RuntimeError:
            answer.result()  # which says more, if the server has failed
            raise
        answer.result()
        connections.senders[server], server.met = sender, server.about.instance

    return connections.without(servers, _at_once(servers, join))


def send(
    connections: Connections, source: WeightSource, servers: list[ServerClient], bucket_bytes: int
) -> tuple[int, int]:
    """Broadcast all weights to the servers, which load them; those that fail are lost.

    The source is read to its end whatever happens, since other ranks take part.

    Returns:
        Bytes of the weights, and bytes of the largest buffer.
    """

    def lost(results: Mapping[ServerClient, Any]) -> list[ServerClient]:
        return connections.without(left, results)

    asked = {server: server.call("receive_weights") for server in servers}
    answers = {server: asyncio.run_coroutine_threadsafe(call, connections.loop) for server, call in asked.items()}
    left, num_bytes, largest = servers, 0, 0
    for buffer, placements in fill_buckets(source.tensors(), bucket_bytes):
        bucket = buffer[: placements[-1].end].cpu()
        left = lost(_at_once(left, functools.partial(_broadcast, connections, bucket, placements)))
        num_bytes, largest = num_bytes + total_bytes(placements), max(largest, buffer.numel())
    left = lost(_at_once(left, lambda server: connections.senders[server].end()))
    lost(_at_once(left, lambda server: answers[server].result()))
    return num_bytes, largest


def _broadcast(connections: Connections, bucket: Tensor, placements: list[Placement], server: ServerClient) -> None:
    if server.state == LOST:
        raise RuntimeError(f"the server {server.url} was lost meanwhile")
    connections.senders[server].send(bucket, placements)


def _at_once(servers: list[ServerClient], work: Callable[[ServerClient], Any]) -> dict[ServerClient, Exception]:
    """Do something for each server, each in a thread of its own; returns what failed."""
    if not servers:
        return {}
    with ThreadPoolExecutor(len(servers)) as pool:
        futures = {server: pool.submit(work, server) for server in servers}
    errors = {server: future.exception() for server, future in futures.items()}
    return {server: error for server, error in errors.items() if isinstance(error, Exception)}
