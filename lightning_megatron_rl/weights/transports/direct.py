"""Weights from the ranks that hold them to the workers that load them: both ends of one server's group.

All ranks of a replica and all workers of a server are in it, the ranks first. Everything goes from one process to
another; nothing is broadcast.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_megatron_rl.compat.gloo import gloo_group
from lightning_megatron_rl.parallel.hosts import own_address
from lightning_megatron_rl.weights.messages import (
    HeldTensor,
    Message,
    Messages,
    empty_tensors,
    read_message,
    write_message,
)
from lightning_megatron_rl.weights.reads import Reads

PROBE_BYTES = 16 * 2**20  # that ranks send the workers when they meet, to measure what the link carries
LEAST_PROBE = 2**16  # of them, from one rank to one worker
NUM_PROBES = 3  # of which the fastest counts: the first opens the connections' windows


def server_group(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    """Return a group of trainer and workers; whether it is one of gloo or of NCCL is decided here.

    It is one of gloo: NCCL between nodes has not been run.
    """
    return gloo_group(store, rank, size, timeout, address)


@dataclass(frozen=True)
class DirectMeeting:
    """Where the ranks of a replica and the workers of a server meet; plain data, which travels as JSON."""

    key: str  # of the meeting
    address: str  # of the store
    port: int
    host: str  # the server's
    num_ranks: int
    num_workers: int
    timeout_s: float  # deadline of the meeting, and of each message

    @property
    def probe_bytes(self) -> int:
        """That each rank sends each worker at a time to measure the link."""
        return max(LEAST_PROBE, PROBE_BYTES // (self.num_ranks * self.num_workers))

    def join(self, rank: int, towards: str) -> Any:
        """Return the group, in which this process has a number; `towards` is a host that it is reached from.

        Raises:
            RuntimeError: Not all came in time.
        """
        timeout = timedelta(seconds=self.timeout_s)
        store = dist.TCPStore(self.address, self.port, is_master=False, timeout=timeout)
        prefixed = dist.PrefixStore(self.key, store)
        size = self.num_ranks + self.num_workers
        return server_group(prefixed, rank, size, timeout, own_address(towards, self.port))


class RankEnd:
    """A rank's end.

    Args:
        meeting: Of all.
        rank: Number of the rank in the replica; 0 is the leader.
        messages: That it sends, by worker.
        device: Of what it holds.
    """

    def __init__(self, meeting: DirectMeeting, rank: int, messages: Sequence[Messages], device: torch.device) -> None:
        self._meeting = meeting
        self._rank = rank
        self._messages = messages
        self._device = device
        self._group: Any = None
        self.link_rate = 0.0  # what the leader has measured of the link to the server. # bytes per second

    def meet(self, plan: Sequence[Sequence[Messages]]) -> None:
        """Wait for the others and measure the link.

        Args:
            plan: All messages, by rank and worker, which the leader tells the workers.

        Raises:
            RuntimeError: Not all came in time.
        """
        meeting = self._meeting
        self._group = meeting.join(self._rank, meeting.host)
        probe = torch.zeros(meeting.probe_bytes, dtype=torch.uint8)
        for _ in range(NUM_PROBES):
            began = time.perf_counter()
            self._wait([self._post(probe, worker) for worker in range(meeting.num_workers)])
            self._hear()
            rate = probe.numel() * meeting.num_ranks * meeting.num_workers / (time.perf_counter() - began)
            self.link_rate = max(self.link_rate, rate)
        if self._rank == 0:
            for worker in range(meeting.num_workers):
                plain = [[message.to_plain() for message in of_rank[worker]] for of_rank in plan]
                text = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
                self._wait([self._post(torch.tensor([text.numel()]), worker)])
                self._wait([self._post(text, worker)])

    def send(self, held: Mapping[str, HeldTensor]) -> tuple[list[int], int, float]:
        """Send all messages; the leader returns when the workers have those of all ranks.

        Args:
            held: What this rank has.

        Returns:
            Bytes that this rank has sent, by worker; bytes of its buffers; and seconds.

        Raises:
            RuntimeError: A worker is gone, takes too long, or has not got what the plan says.
        """
        began = time.perf_counter()
        lengths = [max((message.num_bytes for message in messages), default=0) for messages in self._messages]
        buffers = [torch.empty(length, dtype=torch.uint8, device=self._device) for length in lengths]
        sent, under_way = [0] * len(buffers), {}
        for number in range(max(map(len, self._messages), default=0)):
            for worker, messages in enumerate(self._messages):
                if number < len(messages):
                    if worker in under_way:
                        under_way.pop(worker).wait()  # its buffer is free
                    packed = write_message(messages[number], held, buffers[worker]).cpu()
                    under_way[worker] = self._post(packed, worker)
                    sent[worker] += packed.numel()
        self._wait(list(under_way.values()))
        self._hear()
        return sent, sum(lengths), time.perf_counter() - began

    def _post(self, tensor: Tensor, worker: int) -> Any:
        return self._group.send([tensor], self._meeting.num_ranks + worker, 0)

    def _wait(self, works: list[Any]) -> None:
        for work in works:
            work.wait()

    def _hear(self) -> None:
        """On the leader, wait until each worker says that it has everything."""
        if self._rank == 0:
            for worker in range(self._meeting.num_workers):
                self._group.recv([torch.empty(1, dtype=torch.uint8)], self._meeting.num_ranks + worker, 0).wait()


class WorkerEnd:
    """A worker's end; making it is the meeting.

    Args:
        meeting: Of all.
        worker: Number of the worker.
        reads: What it reads of each tensor.

    Raises:
        RuntimeError: Not all came in time.
        ValueError: The plan is not that of what it reads.
    """

    def __init__(self, meeting: DirectMeeting, worker: int, reads: Reads) -> None:
        self._reads = reads
        self._group = meeting.join(meeting.num_ranks + worker, meeting.address)
        probes = [torch.empty(meeting.probe_bytes, dtype=torch.uint8) for _ in range(meeting.num_ranks)]
        for _ in range(NUM_PROBES):
            for work in [self._post(probe, rank) for rank, probe in enumerate(probes)]:
                work.wait()
            self._confirm()
        length = torch.empty(1, dtype=torch.int64)
        self._post(length, 0).wait()
        text = torch.empty(int(length), dtype=torch.uint8)
        self._post(text, 0).wait()
        shapes = {name: read.shape for name, read in reads.items()}
        plain = json.loads(text.numpy().tobytes())
        self._messages = [[Message.from_plain(message, shapes) for message in of_rank] for of_rank in plain]
        self._check()

    def _check(self) -> None:
        parts = [part for of_rank in self._messages for message in of_rank for part in message.parts]
        for part in parts:
            if part.dtype != self._reads[part.name].dtype:
                raise ValueError(f"{part.name} comes as {part.dtype}, and is read as {self._reads[part.name].dtype}")
        planned = sum(part.end - part.offset for part in parts)
        wanted = sum(read.num_bytes for read in self._reads.values())
        if planned != wanted:
            raise ValueError(f"the trainer's ranks send {planned} bytes of {wanted} that this worker reads")

    def receive(self, *, nan: bool = False) -> tuple[dict[str, Tensor], int]:
        """Take all messages of an update.

        Args:
            nan: Whether what this worker does not read is NaN, and not whatever was in the memory.

        Returns:
            Whole tensors, of which what this worker reads is filled in; and the bytes that came.

        Raises:
            RuntimeError: A rank is gone, or takes too long.
        """
        tensors, num_bytes = empty_tensors(self._reads, nan=nan), 0
        lengths = [max((message.num_bytes for message in messages), default=0) for messages in self._messages]
        buffers = [torch.empty(length, dtype=torch.uint8) for length in lengths]
        under_way = {
            rank: self._post(buffers[rank][: messages[0].num_bytes], rank)
            for rank, messages in enumerate(self._messages)
            if messages
        }
        for number in range(max(map(len, self._messages), default=0)):
            for rank, messages in enumerate(self._messages):
                if number >= len(messages):
                    continue
                under_way.pop(rank).wait()
                read_message(messages[number], buffers[rank][: messages[number].num_bytes], tensors)
                num_bytes += messages[number].num_bytes
                if number + 1 < len(messages):
                    under_way[rank] = self._post(buffers[rank][: messages[number + 1].num_bytes], rank)
        self._confirm()
        return tensors, num_bytes

    def _post(self, tensor: Tensor, rank: int) -> Any:
        return self._group.recv([tensor], rank, 0)

    def _confirm(self) -> None:
        self._group.send([torch.ones(1, dtype=torch.uint8)], 0, 0).wait()
