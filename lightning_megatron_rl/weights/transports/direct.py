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

    def join(self, rank: int, towards: str) -> "_Lines":
        """Return the lines to all others of process `rank`, which is reached from the host `towards`.

        Raises:
            RuntimeError: Not all came in time.
        """
        timeout = timedelta(seconds=self.timeout_s)
        store = dist.TCPStore(self.address, self.port, is_master=False, timeout=timeout)
        prefixed = dist.PrefixStore(self.key, store)
        size = self.num_ranks + self.num_workers
        return _Lines(server_group(prefixed, rank, size, timeout, own_address(towards, self.port)))


class _Lines:
    """One process's connections to the others of a group, on each of which one message is under way at a time.

    The first failure closes them, so that none of the others waits for this process. What is under way keeps them open:
    it is known here alone, not to the frames of an error that somebody keeps.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._under_way: dict[int, Any] = {}

    def send(self, tensor: Tensor, other: int) -> None:
        """Begin to send to process `other`."""
        self._under_way[other] = self._group.send([tensor], other, 0)

    def receive(self, tensor: Tensor, other: int) -> None:
        """Begin to receive from process `other`."""
        self._under_way[other] = self._group.recv([tensor], other, 0)

    def wait(self, other: int | None = None) -> None:
        """Wait for what is under way to or from a process, if there is anything; None: all of them.

        Raises:
            RuntimeError: It is gone, or takes too long.
        """
        for number in list(self._under_way) if other is None else [other]:
            try:
                if number in self._under_way:
                    self._under_way.pop(number).wait()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Leave the group."""
        self._under_way.clear()
        self._group = None


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
        self._lines: _Lines | None = None
        self.link_rate = 0.0  # what the leader has measured of the link to the server. # bytes per second

    def meet(self, plan: Sequence[Sequence[Messages]]) -> None:
        """Wait for the others and measure the link.

        Args:
            plan: All messages, by rank and worker, which the leader tells the workers.

        Raises:
            RuntimeError: Not all came in time.
        """
        meeting = self._meeting
        lines = self._lines = meeting.join(self._rank, meeting.host)
        workers = self._workers
        probe = torch.zeros(meeting.probe_bytes, dtype=torch.uint8)
        for _ in range(NUM_PROBES):
            began = time.perf_counter()
            for worker in workers:
                lines.send(probe, worker)
            lines.wait()
            self._hear()
            rate = probe.numel() * meeting.num_ranks * meeting.num_workers / (time.perf_counter() - began)
            self.link_rate = max(self.link_rate, rate)
        if self._rank == 0:
            for number, worker in enumerate(workers):
                plain = [[message.to_plain() for message in of_rank[number]] for of_rank in plan]
                text = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
                for told in (torch.tensor([text.numel()]), text):
                    lines.send(told, worker)
                    lines.wait()

    def send(self, held: Mapping[str, HeldTensor]) -> tuple[list[int], int, float]:
        """Send all messages; the leader returns when the workers have those of all ranks.

        Args:
            held: What this rank has.

        Returns:
            Bytes that this rank has sent, by worker; bytes of its buffers; and seconds.

        Raises:
            RuntimeError: A worker is gone, takes too long, or has not got what the plan says.
        """
        began, lines = time.perf_counter(), self._lines
        assert lines is not None
        lengths = [max((message.num_bytes for message in messages), default=0) for messages in self._messages]
        buffers = [torch.empty(length, dtype=torch.uint8, device=self._device) for length in lengths]
        sent = [0] * len(buffers)
        for number in range(max(map(len, self._messages), default=0)):
            for place, (worker, messages) in enumerate(zip(self._workers, self._messages, strict=True)):
                if number < len(messages):
                    lines.wait(worker)  # then its buffer is free
                    packed = write_message(messages[number], held, buffers[place]).cpu()
                    lines.send(packed, worker)
                    sent[place] += packed.numel()
        lines.wait()
        self._hear()
        return sent, sum(lengths), time.perf_counter() - began

    def leave(self) -> None:
        """Close the connections."""
        if self._lines is not None:
            self._lines.close()

    @property
    def _workers(self) -> list[int]:
        """Their numbers in the group."""
        return [self._meeting.num_ranks + worker for worker in range(self._meeting.num_workers)]

    def _hear(self) -> None:
        """On the leader, wait until each worker says that it has everything."""
        if self._rank == 0:
            assert self._lines is not None
            for worker in self._workers:
                self._lines.receive(torch.empty(1, dtype=torch.uint8), worker)
            self._lines.wait()


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
        self._lines = meeting.join(meeting.num_ranks + worker, meeting.address)
        probes = [torch.empty(meeting.probe_bytes, dtype=torch.uint8) for _ in range(meeting.num_ranks)]
        for _ in range(NUM_PROBES):
            for rank, probe in enumerate(probes):
                self._lines.receive(probe, rank)
            self._lines.wait()
            self._confirm()
        length = self._hear(torch.empty(1, dtype=torch.int64))
        text = self._hear(torch.empty(int(length), dtype=torch.uint8))
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

        def begin(rank: int, number: int) -> None:
            if number < len(self._messages[rank]):
                self._lines.receive(buffers[rank][: self._messages[rank][number].num_bytes], rank)

        for rank in range(len(buffers)):
            begin(rank, 0)
        for number in range(max(map(len, self._messages), default=0)):
            for rank, messages in enumerate(self._messages):
                if number < len(messages):
                    self._lines.wait(rank)
                    read_message(messages[number], buffers[rank], tensors)
                    num_bytes += messages[number].num_bytes
                    begin(rank, number + 1)
        self._confirm()
        return tensors, num_bytes

    def _hear(self, tensor: Tensor) -> Tensor:
        """What the leader says."""
        self._lines.receive(tensor, 0)
        self._lines.wait()
        return tensor

    def _confirm(self) -> None:
        """Tell the leader that everything has come."""
        self._lines.send(torch.ones(1, dtype=torch.uint8), 0)
        self._lines.wait()
