"""Weights over the network: a trainer broadcasts them, bucket by bucket, to the workers of an engine on any host.

Each engine has a group of its own with the trainer, by gloo, so that a broken one holds up no other. A worker loads
what has come when all of it is there: a trainer or a network that goes meanwhile leaves the old weights as they are.
What comes over NCCL is copied into the model as it comes: then the trainer takes no server for one that has weights.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_megatron_rl.compat.gloo import gloo_group
from lightning_megatron_rl.parallel.hosts import own_address
from lightning_megatron_rl.weights.copies import Copies
from lightning_megatron_rl.weights.loader import WeightLoader, reload_weights
from lightning_megatron_rl.weights.placement import Placement, view_all
from lightning_megatron_rl.weights.reads import Read, Reads, dtype_of, prove_reads, record_reads
from lightning_megatron_rl.weights.transports.direct import DirectMeeting, WorkerEnd
from lightning_megatron_rl.weights.transports.host import SharedWeightsReceiver

NETWORK = "network"  # the name of this way
EXTENSION = "lightning_megatron_rl.weights.transports.network.NetworkReceiver"
PIECE_BYTES = 32 * 2**20  # of a bucket in a broadcast: a whole one, to many servers at a time, may outlast the deadline
_END = 0  # length of the header behind the last bucket


@dataclass(frozen=True)
class NetworkMeeting:
    """Where the trainer waits for the workers of one engine; plain data, which travels as JSON."""

    address: str  # of the trainer's host, as the engine's reaches it
    port: int
    world_size: int  # the trainer, which is rank 0, and the workers
    timeout_s: float


class NetworkSender:
    """The trainer's end of one engine's group.

    Args:
        engine_host: Name or address of the engine's host.
        num_workers: Of the engine.
        timeout_s: Deadline of the meeting, and of each broadcast. # seconds
    """

    def __init__(self, engine_host: str, num_workers: int, timeout_s: float) -> None:
        address = own_address(engine_host, 1)
        self._deadline = timedelta(seconds=timeout_s)
        # a port that the system chooses, on the interface towards the engine alone
        self._store = dist.TCPStore(address, 0, is_master=True, timeout=self._deadline, wait_for_workers=False)
        self.meeting = NetworkMeeting(address, self._store.port, num_workers + 1, timeout_s)
        self._group: Any = None

    def meet(self) -> None:
        """Wait for the workers, which have been told of `meeting`.

        Raises:
            RuntimeError: They did not come in time.
        """
        prefixed = dist.PrefixStore("weights", self._store)
        self._group = gloo_group(prefixed, 0, self.meeting.world_size, self._deadline, self.meeting.address)

    def send(self, part: Tensor) -> None:
        """Broadcast one of the parts that `parts_of` returns; each has the deadline for itself.

        Raises:
            RuntimeError: A worker is gone, or takes too long.
        """
        self._group.broadcast([part], dist.BroadcastOptions()).wait()

    def end(self) -> None:
        """Say that this was all."""
        self.send(torch.tensor([_END, 0]))


def parts_of(bucket: Tensor, placements: list[Placement]) -> list[Tensor]:
    """Return what is broadcast of one bucket: sizes, what it holds, and its bytes in pieces.

    Args:
        bucket: ``[bytes]`` uint8 on the CPU.
        placements: What it holds.
    """
    header = json.dumps([to_plain(place) for place in placements]).encode()
    sizes = torch.tensor([len(header), bucket.numel()])
    return [sizes, torch.frombuffer(bytearray(header), dtype=torch.uint8), *bucket.split(PIECE_BYTES)]


class NetworkReceiver(SharedWeightsReceiver):
    """Methods that vLLM adds to each of its workers (`worker_extension_cls`), called with plain data."""

    rank: int  # the worker's own
    _trainer: Any = None
    _ranks: WorkerEnd | None = None
    _loader: WeightLoader | None = None  # that knows the copies which loading consists of
    _copies: list[list[Copies]] | None = None  # into the model, out of what messages of the ranks come to

    def join_trainer(self, meeting: dict[str, Any]) -> dict[str, Any]:
        """Meet the trainer, in place of an earlier one."""
        place = NetworkMeeting(**meeting)
        self.leave_trainer()
        self._reads: Reads | None = None
        self._loader = None
        timeout = timedelta(seconds=place.timeout_s)
        store = dist.TCPStore(place.address, place.port, is_master=False, timeout=timeout)
        prefixed = dist.PrefixStore("weights", store)
        here = own_address(place.address, place.port)
        self._trainer = gloo_group(prefixed, self.rank + 1, place.world_size, timeout, here)
        return {"rank": self.rank}

    def receive_weights(self, record: bool = False, copies: bool = False) -> dict[str, Any]:
        """Take all buckets of an update, then load them layer by layer.

        Args:
            record: Whether to note what is read of them.
            copies: And by what copies they are loaded, if by copies alone: for weights that will come to the device.

        Returns:
            The bytes that came, the number of the worker, and what it reads.
        """
        buckets, held = list(self._buckets()), list[tuple[str, Tensor]]()
        for bucket, placements in buckets:
            held += list(zip((place.name for place in placements), view_all(placements, [bucket]), strict=True))
        num_bytes = sum(bucket.numel() for bucket, _ in buckets)
        if not record:
            self._load(iter(held))
            return {"num_bytes": num_bytes, "rank": self.rank}
        self._leave_ranks()
        self._reads = record_reads(self._load, held, self._tensors)
        self._loader = self._record_copies(buckets) if copies else None
        reads = {name: read.to_plain() for name, read in self._reads.items()}
        return {"num_bytes": num_bytes, "rank": self.rank, "reads": reads}

    def receive_parts(self, meeting: dict[str, Any] | None) -> dict[str, Any]:
        """Take what this worker reads of an update from the ranks that hold it, then load it layer by layer.

        Where it comes to the worker's device and copies load the model, they begin before all of it is there.

        Args:
            meeting: Where the ranks are; None: where they were the last time.

        Returns:
            The bytes that came, and the number of the worker.
        """
        ranks, self._ranks = self._ranks, None  # a failure leaves the group, which nobody waits in then
        if self._reads is None:
            raise RuntimeError("this worker has not noted what it reads: it takes buckets first")
        if meeting is not None:
            if ranks is not None:
                ranks.leave()
            ranks = WorkerEnd(DirectMeeting(**meeting), self.rank, self._reads, self._tensors()[0].device)
        if ranks is None:
            raise RuntimeError("this worker has not met the trainer's ranks")
        copies, self._copies = self._copies, None
        try:
            if meeting is None and copies is not None:
                num_bytes = ranks.receive_in_place(copies)
            else:
                tensors, num_bytes = ranks.receive(nan=meeting is not None)
                if meeting is not None:
                    prove_reads(self._load, tensors, self._reads, self._tensors)
                else:
                    self._load(iter(tensors.items()))
                copies = self._plan_copies(ranks)
        except BaseException:
            ranks.leave()
            raise
        self._ranks, self._copies = ranks, copies
        return {"num_bytes": num_bytes, "rank": self.rank}

    def _record_copies(self, buckets: list[tuple[Tensor, list[Placement]]]) -> WeightLoader | None:
        """Load weights once more, and note the copies that this consists of; None where it is more than copies."""
        loader = WeightLoader(self.model_runner.model, self.model_runner.model_config)
        if loader.reloads or self._tensors()[0].device.type != "cuda":  # on a CPU vLLM packs weights
            return None
        loader.begin()
        for bucket, placements in buckets:
            loader.load([bucket], placements, keep=True)
        loader.end()
        return loader

    def _plan_copies(self, ranks: WorkerEnd) -> list[list[Copies]] | None:
        landings = ranks.landings
        if self._loader is None or landings is None:
            return None
        copies = self._loader.copies_of(ranks.weights, list(chain(*landings)))
        if copies is None:
            return None
        each = iter(copies)
        return [list(islice(each, len(of_rank))) for of_rank in landings]

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._copies = None  # the model may lie elsewhere then
        reload_weights(self.model_runner, weights)

    def _tensors(self) -> list[Tensor]:
        model = self.model_runner.model
        return [*model.parameters(), *model.buffers()]

    def _buckets(self) -> Iterator[tuple[Tensor, list[Placement]]]:
        while True:
            sizes = self._take(torch.empty(2, dtype=torch.int64))
            header_bytes, bucket_bytes = sizes.tolist()
            if header_bytes == _END:
                return
            header = self._take(torch.empty(header_bytes, dtype=torch.uint8))
            placements = [from_plain(plain) for plain in json.loads(header.numpy().tobytes())]
            bucket = torch.empty(bucket_bytes, dtype=torch.uint8)
            for piece in bucket.split(PIECE_BYTES):
                self._take(piece)
            yield bucket, placements

    def _take(self, tensor: Tensor) -> Tensor:
        self._trainer.broadcast([tensor], dist.BroadcastOptions()).wait()
        return tensor

    def leave_trainer(self) -> dict[str, Any]:
        """Close the connections to the trainer."""
        self._trainer = None
        self._leave_ranks()
        return {}

    def _leave_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.leave()
        self._ranks = self._copies = None


def to_plain(place: Placement) -> list[Any]:
    """Return a tensor's place in a bucket without gaps as JSON has it."""
    return [place.name, str(place.dtype).removeprefix("torch."), list(place.shape), list(place.stride), place.offset]


def from_plain(plain: list[Any]) -> Placement:
    """Return what `to_plain` was given.

    Raises:
        ValueError: The dtype is none of torch's.
    """
    name, dtype, shape, stride, offset = plain
    return Placement(name, 0, dtype_of(dtype), tuple(shape), tuple(stride), offset)


def plain_reads(plain: dict[str, Any]) -> Reads:
    """Return what a worker reads, of its answer.

    Raises:
        ValueError: A dtype is none of torch's, or a part is none of its tensor's.
    """
    return {name: Read.from_plain(read) for name, read in plain.items()}
