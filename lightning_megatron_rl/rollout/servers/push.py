"""One push of weights to the workers of several servers, at the same time: straight from the ranks, or in buckets.

A server's first push is one of buckets, of which its workers note what they read. Later ones bring each worker that.
"""

import asyncio
import functools
import logging
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from torch import Tensor

from lightning_megatron_rl.rollout.protocol import DirectReport
from lightning_megatron_rl.rollout.servers.client import LOST, ServerClient
from lightning_megatron_rl.rollout.servers.connections import Connections
from lightning_megatron_rl.weights.direct import Delivery, Order, Route
from lightning_megatron_rl.weights.messages import can_send, plan_messages
from lightning_megatron_rl.weights.placement import fill_buckets
from lightning_megatron_rl.weights.reads import Reads
from lightning_megatron_rl.weights.source import DirectSender, WeightSource
from lightning_megatron_rl.weights.transports.base import total_bytes
from lightning_megatron_rl.weights.transports.direct import DirectMeeting
from lightning_megatron_rl.weights.transports.network import NetworkSender, parts_of, plain_reads

log = logging.getLogger(__name__)

MEET_S = 30.0  # for the workers of a server to come to the trainer's group, and for each part of what is sent then


def meet(connections: Connections, servers: list[ServerClient], timeout_s: float) -> list[ServerClient]:
    """Make a group with the workers of each server that has none with this trainer; returns those that came.

    Args:
        connections: Of the engine.
        servers: That are paused.
        timeout_s: Deadline of the meeting and of each broadcast, at most `MEET_S`. # seconds
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
        server.forget_workers()
        connections.senders[server], server.met = sender, server.about.instance

    return connections.without(servers, _at_once(servers, join))


@dataclass
class Deliveries:
    """What came of sending straight to servers."""

    is_possible: bool  # to workers whose reads are known
    done: list[ServerClient] = field(default_factory=list)  # have loaded what came
    others: list[ServerClient] = field(default_factory=list)  # take buckets
    num_bytes: int = 0  # of the weights
    buffer_bytes: int = 0  # of the rank that had most
    report: DirectReport | None = None


def deliver(
    connections: Connections, source: WeightSource, servers: list[ServerClient], bucket_bytes: int
) -> Deliveries:
    """Let all ranks send each worker what it loads, if its reads are known; servers that fail are lost.

    Args:
        connections: Of the engine.
        source: Of which nothing has been taken.
        servers: That have met this trainer.
        bucket_bytes: That a rank holds for each server, and a worker.
    """
    sender = connections.direct_sender(source)
    if sender is None:
        if connections.weights_over == "nccl" and not connections.has_told_of_buckets:
            connections.has_told_of_buckets = True
            log.warning(
                "engine.weights_over='nccl' is ignored: these weights can only go in buckets, which go over gloo"
            )
        return Deliveries(False, others=servers)
    backend = choose_backend(connections, source)
    found = {server: _route(connections, sender, server, bucket_bytes, backend) for server in servers}
    routes = {server: route for server, route in found.items() if route is not None}
    sizes = [_total_bytes(server.reads[0]) for server in routes if server.reads]
    result = Deliveries(True, others=[server for server in servers if server not in routes])
    answers = {
        server: _ask(connections, server, "receive_parts", vars(route.meeting) if route.meeting else None)
        for server, route in routes.items()
    }
    delivered = sender.send(Order(list(routes.values()), bool(result.others) or not routes))
    came: dict[ServerClient, Delivery] = {}
    for server, route in routes.items():
        delivery = delivered.deliveries[route.key]
        if not delivery.has_met:
            log.warning("weights go to the server %s in buckets: %s", server.url, delivery.error)
            server.takes_buckets = True
            answers[server].exception()  # it has given up as well
            result.others.append(server)
        elif delivery.error is not None:
            connections.lose(server, RuntimeError(f"not all weights went to {server.url}: {delivery.error}"))
        else:
            came[server], server.direct_key = delivery, route.key
    there = [server for server in came if server.state != LOST]
    result.done = connections.without(there, _at_once(there, lambda server: answers[server].result()))
    if source.whole is None or not source.whole.stays:
        connections.let_go()
    if came:
        result.num_bytes = sizes[0]
        result.buffer_bytes = sum(delivery.buffer_bytes for delivery in came.values())
        result.report = _report(list(came.values()))
    return result


def choose_backend(connections: Connections, source: WeightSource) -> Literal["gloo", "nccl"]:
    """Return what data goes over: NCCL only where that is asked for, since it has not been run between machines yet."""
    return "nccl" if connections.weights_over == "nccl" and source.device.type == "cuda" else "gloo"


def _route(
    connections: Connections,
    sender: DirectSender,
    server: ServerClient,
    bucket_bytes: int,
    backend: Literal["gloo", "nccl"],
) -> Route | None:
    """Return the way to a server, planned if it is new; None: it takes buckets."""
    met = connections.senders.get(server)
    if server.reads is None or server.takes_buckets or met is None:
        return None
    held, reads = sender.holdings, server.reads
    if not all(can_send(held, of_worker) for of_worker in reads):
        server.reads = None  # they are other weights now
        return None
    if server.direct_key in sender.keys:
        return Route(server.direct_key)
    limit = bucket_bytes // (2 * max(len(held), len(reads)))  # both sides hold two messages of each line
    messages = plan_messages(held, reads, max(1, limit))
    if messages is None:
        log.info("weights go to the server %s in buckets: parts are with ranks of other replicas", server.url)
        server.takes_buckets = True
        return None
    place, key = met.meeting, uuid.uuid4().hex
    sizes = (len(held), len(reads))
    meeting = DirectMeeting(key, place.address, place.port, server.host, *sizes, place.timeout_s, backend)
    return Route(key, meeting, messages)


def _total_bytes(reads: Reads) -> int:
    return sum(prod(read.shape) * read.dtype.itemsize for read in reads.values())


def _report(came: list[Delivery]) -> DirectReport:
    num_bytes = sum(sum(delivery.sent) for delivery in came)
    seconds = max(delivery.seconds for delivery in came)
    carried = sum(delivery.link_rate for delivery in came)
    return DirectReport(
        num_bytes,
        max(max(delivery.sent) for delivery in came),
        seconds,
        num_bytes / seconds / carried if seconds and carried else 0.0,
    )


def _ask(connections: Connections, server: ServerClient, method: str, *arguments: Any) -> Future[list[Any]]:
    return asyncio.run_coroutine_threadsafe(server.call(method, *arguments), connections.loop)


def send(
    connections: Connections, source: WeightSource, servers: list[ServerClient], bucket_bytes: int, *, record: bool
) -> tuple[list[ServerClient], int, int]:
    """Broadcast all weights to servers, which load them; those that fail are lost.

    The source is read to its end whatever happens, since other ranks take part; not at all if there is no server.

    Args:
        connections: Of the engine.
        source: Of the weights.
        servers: That have met this trainer.
        bucket_bytes: Size of the buffer.
        record: Whether workers note what they read, where it is not known.

    Returns:
        The servers that have loaded them, bytes of the weights, and bytes of the largest buffer.
    """
    if not servers:
        return [], 0, 0

    def lost(results: Mapping[ServerClient, Any]) -> list[ServerClient]:
        return connections.without(left, results)

    def load(server: ServerClient) -> None:
        told = answers[server].result()
        if records[server]:
            server.reads = [plain_reads(answer["reads"]) for answer in sorted(told, key=lambda one: one["rank"])]

    records = {server: record and server.reads is None and not server.takes_buckets for server in servers}
    copies = choose_backend(connections, source) == "nccl"
    answers = {server: _ask(connections, server, "receive_weights", records[server], copies) for server in servers}
    left, num_bytes, largest = servers, 0, 0
    for buffer, placements in fill_buckets(source.tensors(), bucket_bytes):
        bucket = buffer[: placements[-1].end].cpu()
        for part in parts_of(bucket, placements):  # no server waits longer than others need for a part
            left = lost(_at_once(left, functools.partial(_broadcast, connections, part)))
        num_bytes, largest = num_bytes + total_bytes(placements), max(largest, buffer.numel())
    left = lost(_at_once(left, lambda server: connections.senders[server].end()))
    return lost(_at_once(left, load)), num_bytes, largest


def _broadcast(connections: Connections, part: Tensor, server: ServerClient) -> None:
    if server.state == LOST:
        raise RuntimeError(f"the server {server.url} was lost meanwhile")
    connections.senders[server].send(part)


def _at_once(servers: list[ServerClient], work: Callable[[ServerClient], Any]) -> dict[ServerClient, Exception]:
    """Do something for each server, each in a thread of its own; returns what failed."""
    if not servers:
        return {}
    with ThreadPoolExecutor(len(servers)) as pool:
        futures = {server: pool.submit(work, server) for server in servers}
    errors = {server: future.exception() for server, future in futures.items()}
    return {server: error for server, error in errors.items() if isinstance(error, Exception)}
