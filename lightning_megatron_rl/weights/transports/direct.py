"""Weights from the ranks that hold them to the workers that load them: both ends of one server's group.

All ranks of a replica and all workers of a server are in it, the ranks first. Everything goes from one process to
another; nothing is broadcast. A group of gloo is there in any case; data may go over NCCL beside it.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Literal

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_megatron_rl.compat.gloo import gloo_group
from lightning_megatron_rl.parallel.hosts import own_address
from lightning_megatron_rl.weights.copies import Copies
from lightning_megatron_rl.weights.lent import LentPiece, LentWeight
from lightning_megatron_rl.weights.messages import (
    HeldTensor,
    Message,
    Messages,
    empty_tensors,
    read_message,
)
from lightning_megatron_rl.weights.placement import aligned
from lightning_megatron_rl.weights.reads import Reads
from lightning_megatron_rl.weights.send_buffers import SendBuffers
from lightning_megatron_rl.weights.transports.lines import GlooLines, Lines, open_nccl
from lightning_megatron_rl.weights.transports.nccl import NCCLGroup

log = logging.getLogger(__name__)

PROBE_BYTES = 16 * 2**20  # that ranks send the workers when they meet, to measure what the link carries
LEAST_PROBE = 2**16  # of them, from one rank to one worker
NUM_PROBES = 3  # of which the fastest counts: the first opens the connections' windows


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
    backend: Literal["gloo", "nccl"] = "gloo"  # that data should go over

    @property
    def names(self) -> list[str]:
        """Of all processes, by their numbers."""
        workers = [f"worker {worker} of the server on {self.host}" for worker in range(self.num_workers)]
        return [f"rank {rank} of the replica" for rank in range(self.num_ranks)] + workers

    @property
    def probe_bytes(self) -> int:
        """That each rank sends each worker at a time to measure the link."""
        return max(LEAST_PROBE, PROBE_BYTES // (self.num_ranks * self.num_workers))

    def join(self, number: int, towards: str) -> GlooLines:
        """Return the lines to all others of process `number`, which is reached from the host `towards`.

        Raises:
            RuntimeError: Not all came in time.
        """
        address = own_address(towards, self.port)
        timeout = timedelta(seconds=self.timeout_s)
        return GlooLines(gloo_group(self._store(self.key), number, self._size, timeout, address))

    def open_lines(
        self, control: GlooLines, number: int, device: torch.device, lengths: Mapping[int, int]
    ) -> tuple[Lines, str]:
        """Return what data goes over, which all find together: lines over NCCL, or `control`, and why it is not NCCL.

        Args:
            control: What `join` has returned.
            number: Of this process.
            device: This process's.
            lengths: Of the memory that is staged for what comes from each other one. # bytes

        Raises:
            RuntimeError: A process is gone.
        """
        if self.backend == "gloo":
            return control, ""
        is_rank = number < self.num_ranks
        return open_nccl(
            control,
            number,
            self.names,
            range(self.num_ranks, self._size) if is_rank else range(self.num_ranks),
            device,
            lengths,
            lambda: NCCLGroup(self._store(f"{self.key}/nccl"), number, self._size, device),
            self.timeout_s,
            queues=self.num_ranks == 1,
        )

    @property
    def _size(self) -> int:
        return self.num_ranks + self.num_workers

    def _store(self, prefix: str) -> dist.Store:
        timeout = timedelta(seconds=self.timeout_s)
        return dist.PrefixStore(prefix, dist.TCPStore(self.address, self.port, is_master=False, timeout=timeout))


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
        self._control: GlooLines | None = None
        self._lines: Lines | None = None  # for data; may be the same
        self._buffers: SendBuffers | None = None  # from the first update on
        self.link_rate = 0.0  # what the leader has measured of the link to the server. # bytes per second

    def meet(self, plan: Sequence[Sequence[Messages]]) -> None:
        """Wait for the others, find with them what data goes over, and measure the link.

        Args:
            plan: All messages, by rank and worker, which the leader tells the workers.

        Raises:
            RuntimeError: Not all came in time.
        """
        meeting = self._meeting
        control = self._control = meeting.join(self._rank, meeting.host)
        if self._rank == 0:
            for number, worker in enumerate(self._workers):
                plain = [[message.to_plain() for message in of_rank[number]] for of_rank in plan]
                text = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
                for told in (torch.tensor([text.numel()]), text):
                    control.send(told, worker)
                    control.wait()
        lines, reason = meeting.open_lines(control, self._rank, self._device, {})
        self._lines = lines
        if reason and self._rank == 0:
            log.warning("weights go to the server on %s over gloo, since NCCL does not work: %s", meeting.host, reason)
        probe = torch.zeros(meeting.probe_bytes, dtype=torch.uint8, device=lines.device)
        for _ in range(NUM_PROBES):
            began = time.perf_counter()
            lines.begin()
            for worker in self._workers:
                lines.send(probe, worker)
            lines.go()
            lines.end()
            self._hear()
            rate = probe.numel() * meeting.num_ranks * meeting.num_workers / (time.perf_counter() - began)
            self.link_rate = max(self.link_rate, rate)

    def send(self, held: Mapping[str, HeldTensor]) -> tuple[list[int], int, float]:
        """Send all messages; the leader returns when the workers have those of all ranks.

        What is held is referred to until `let_go`, or until it lies elsewhere in a later update.

        Args:
            held: What this rank has, the same parts each time.

        Returns:
            Bytes that this rank has sent, by worker; bytes of its buffers; and seconds.

        Raises:
            RuntimeError: A worker is gone, takes too long, or has not got what the plan says.
        """
        began, lines = time.perf_counter(), self._lines
        assert lines is not None
        buffers = self._buffers = self._buffers or SendBuffers(self._messages, self._device)
        buffers.prepare(held)
        sent = [0] * len(self._messages)
        lines.begin()
        for number in range(max(map(len, self._messages), default=0)):
            for place, (worker, messages) in enumerate(zip(self._workers, self._messages, strict=True)):
                if number < len(messages):
                    packed = buffers.pack(place, number)
                    lines.send(packed, worker)
                    sent[place] += packed.numel()
            lines.go()
        lines.end()
        self._hear()
        return sent, buffers.num_bytes, time.perf_counter() - began

    def let_go(self) -> None:
        """Drop all references to the memory of what was sent."""
        if self._buffers is not None:
            self._buffers.let_go()

    def leave(self) -> None:
        """Close the connections, and drop the buffers."""
        for lines in (self._lines, self._control):
            if lines is not None:
                lines.close()
        self._buffers = None

    @property
    def _workers(self) -> list[int]:
        """Their numbers in the group."""
        return [self._meeting.num_ranks + worker for worker in range(self._meeting.num_workers)]

    def _hear(self) -> None:
        """On the leader, wait until each worker says that it has everything."""
        if self._rank == 0:
            assert self._control is not None
            for worker in self._workers:
                self._control.receive(torch.empty(1, dtype=torch.uint8), worker)
            self._control.wait()


class WorkerEnd:
    """A worker's end; making it is the meeting.

    Args:
        meeting: Of all.
        worker: Number of the worker.
        reads: What it reads of each tensor.
        device: The worker's.

    Raises:
        RuntimeError: Not all came in time.
        ValueError: The plan is not that of what it reads.
    """

    def __init__(self, meeting: DirectMeeting, worker: int, reads: Reads, device: torch.device) -> None:
        self._reads = reads
        self._control = meeting.join(meeting.num_ranks + worker, meeting.address)
        self._lines: Lines = self._control
        try:
            self._messages = self._hear_plan()
            lengths = {rank: max(2 * aligned(length), meeting.probe_bytes) for rank, length in enumerate(self._lengths)}
            self._lines, _ = meeting.open_lines(self._control, meeting.num_ranks + worker, device, lengths)
            probes = [self._lines.empty(meeting.probe_bytes) for _ in range(meeting.num_ranks)]
            for _ in range(NUM_PROBES):
                self._lines.begin()
                for rank, probe in enumerate(probes):
                    self._lines.receive(probe, rank)
                self._lines.go()
                self._lines.end()
                self._confirm()
            self._check()
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Close the connections."""
        self._lines.close()
        self._control.close()

    @property
    def _lengths(self) -> list[int]:
        """Longest message of each rank. # bytes"""
        return [max((message.num_bytes for message in messages), default=0) for messages in self._messages]

    def _hear_plan(self) -> list[Messages]:
        length = self._hear(torch.empty(1, dtype=torch.int64))
        text = self._hear(torch.empty(int(length), dtype=torch.uint8))
        shapes = {name: read.shape for name, read in self._reads.items()}
        plain = json.loads(text.numpy().tobytes())
        return [[Message.from_plain(message, shapes) for message in of_rank] for of_rank in plain]

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
        buffers = [self._lines.empty(length) for length in self._lengths]
        self._lines.begin()

        def begin(rank: int, number: int) -> None:
            if number < len(self._messages[rank]):
                self._lines.receive(buffers[rank][: self._messages[rank][number].num_bytes], rank)

        for rank in range(len(buffers)):
            begin(rank, 0)
        for number in range(max(map(len, self._messages), default=0)):
            self._lines.go()
            for rank, messages in enumerate(self._messages):
                if number < len(messages):
                    self._lines.wait(rank)
                    read_message(messages[number], buffers[rank], tensors)
                    num_bytes += messages[number].num_bytes
                    begin(rank, number + 1)
        self._lines.end()
        self._confirm()
        return tensors, num_bytes

    @property
    def landings(self) -> list[list[Tensor]] | None:
        """Where each message comes to on this device, by rank: two alternate. None: messages come to the host."""
        found = []
        for rank, messages in enumerate(self._messages):
            staged, length = self._lines.staged(rank), aligned(self._lengths[rank])
            if staged is None:
                return None
            starts = [number % 2 * length for number in range(len(messages))]
            found.append(
                [staged[start : start + message.num_bytes] for start, message in zip(starts, messages, strict=True)]
            )
        return found

    @property
    def weights(self) -> dict[str, LentWeight]:
        """What lies where in the messages, which count as memories, those of rank 0 first."""
        pieces: dict[str, list[LentPiece]] = {name: [] for name in self._reads}
        for memory, message in enumerate(chain(*self._messages)):
            for part in message.parts:
                found = part.rectangle
                sizes = {"blocks": 1, "size": found.rows, "step": 0, "stride": found.columns, "width": found.columns}
                piece = LentPiece(memory, part.offset, **sizes, row=found.row, column=found.column)
                pieces[part.name].append(piece)
        return {
            name: LentWeight(self._reads[name].shape, self._reads[name].dtype, tuple(found))
            for name, found in pieces.items()
        }

    def receive_in_place(self, copies: Sequence[Sequence[Copies]]) -> int:
        """Take all messages of an update, and copy out of each where it has come to while the next comes.

        Args:
            copies: Out of `landings`, by rank and message.

        Returns:
            The bytes that came.

        Raises:
            RuntimeError: A rank is gone, or takes too long: the model then has some of the new weights.
        """
        landings, num_bytes = self.landings, 0
        assert landings is not None, "messages come to the host"
        self._lines.begin()
        for number in range(max(map(len, landings), default=0) + 1):
            for rank, places in enumerate(landings):
                if number < len(places):
                    self._lines.receive(places[number], rank)
                    num_bytes += places[number].numel()
            self._lines.go()  # those before have come
            for of_rank in copies:
                if 0 <= number - 1 < len(of_rank):
                    of_rank[number - 1].run()
        if self._lines.device.type == "cuda":
            torch.cuda.synchronize(self._lines.device)
        self._lines.end()
        self._confirm()
        return num_bytes

    def _hear(self, tensor: Tensor) -> Tensor:
        """What the leader says."""
        self._control.receive(tensor, 0)
        self._control.wait()
        return tensor

    def _confirm(self) -> None:
        """Tell the leader that everything has come."""
        self._control.send(torch.ones(1, dtype=torch.uint8), 0)
        self._control.wait()
