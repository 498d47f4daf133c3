"""The receiving end in vLLM's workers: a backend of vLLM's weight-transfer API."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef, rebuild_cuda_tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from lightning_megatron_rl.compat.torch_names import copy_all
from lightning_megatron_rl.weights.copy_kernels import warm_up
from lightning_megatron_rl.weights.cuda_memory import DEVICE, Handle, on_device
from lightning_megatron_rl.weights.lent import LentWeight
from lightning_megatron_rl.weights.loader import WeightLoader
from lightning_megatron_rl.weights.placement import Placement
from lightning_megatron_rl.weights.transports.base import BACKEND, LENT, PASSING, Part
from lightning_megatron_rl.weights.transports.host import SharedWeightsReceiver
from lightning_megatron_rl.weights.transports.nccl import Broadcasts, join_group

log = logging.getLogger(__name__)


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """Where trainer and workers meet for NCCL; the trainer is rank 0, worker i is rank i + 1."""

    port: int
    world_size: int
    timeout_s: float


@dataclass
class PartInfo(Part, WeightTransferUpdateInfo):
    """A `Part`, as vLLM wants it."""


class TransferEngine(WeightTransferEngine[GroupInfo, PartInfo]):
    """Receives parts of the weights through CUDA IPC, NCCL or in the same process, and loads them in place."""

    init_info_cls = GroupInfo
    update_info_cls = PartInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        warm_up(device)
        self.loader = WeightLoader(model, vllm_config.model_config)
        self._group: dist.ProcessGroup | None = None
        self._placements: dict[int, list[Placement]] = {}  # by number of the part
        self._lent: dict[int, list[Tensor]] = {}  # the trainer's memory by its number, perhaps on another GPU
        self._copies: dict[int, list[Tensor]] = {}  # here, of what is on another GPU

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Join the trainer's group."""
        self._group = join_group(
            init_info.port,
            rank=self.parallel_config.rank + 1,
            world_size=init_info.world_size,
            timeout=timedelta(seconds=init_info.timeout_s),
        )

    def start_weight_update(self) -> None:
        """Start an update."""
        self.loader.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one part; when this returns, its memory may be used for the next, unless it is kept to the end."""
        info = self.parse_update_info(update_info)
        self.receive_weights(info)
        if not info.keep:
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: PartInfo) -> None:
        """Load one part, perhaps beside what follows."""
        if update_info.borrowed:
            self.loader.load_borrowed()
            return
        if update_info.placements is not None:
            self._placements[update_info.number] = update_info.placements
        for number, blocks in enumerate(self._receive(update_info), start=update_info.number):
            self.loader.load(blocks, self._placements[number], keep=update_info.keep, stays=update_info.stays)

    def _receive(self, info: PartInfo) -> Iterator[list[Tensor]]:
        """Yield the blocks of this part, and of those that follow in the same message."""
        if info.sizes is None:
            yield info.blocks if info.blocks is not None else self._open(info)
            return
        assert self._group is not None, "the trainer sends no part before the group is there"
        for block in Broadcasts(self._group, info.sizes, self.device).receive():
            yield [block]

    def _open(self, info: PartInfo) -> list[Tensor]:
        if info.handles is not None:
            self._close([info.memory])  # before others are opened: torch counts readers of each
            self._lent[info.memory] = [
                open_memory(handle, self.device) for handle in info.handles[self.parallel_config.rank]
            ]
        lent = self._lent[info.memory]
        if all(block.device == self.device for block in lent):
            return lent
        # no way between the GPUs; by way of memory here, since what sleeps can be written by its own GPU alone
        copies = self._copies.get(info.memory)
        if copies is None:
            copies = self._copies[info.memory] = [torch.empty_like(block, device=self.device) for block in lent]
        copy_all(copies, lent)
        return copies

    def borrow(self, weights: dict[str, LentWeight], memory: list[Handle | Tensor]) -> int | None:
        """Open the memory of several ranks, in place of what is open, to copy all weights out of it.

        Args:
            weights: What lies where in it.
            memory: Of each rank, what it is opened with; that of this process itself.

        Returns:
            The bytes that are read out of other GPUs' memory; None: it cannot be done.
        """
        self._close(list(self._lent))
        self._lent[LENT] = []
        read = None
        try:
            for one in memory:
                self._lent[LENT].append(one if isinstance(one, Tensor) else open_memory(one, self.device))
            if all(block.device == self.device for block in self._lent[LENT]):
                read = self.loader.borrow(weights, self._lent[LENT])
        except RuntimeError as error:
            log.warning("the memory of another rank cannot be opened, so that weights come in buckets: %s", error)
        if read is None:
            self._close([LENT])
            return None
        own = self.device.index
        numbers = [own if isinstance(one, Tensor) else one[DEVICE] for one in memory]
        return sum(size for size, number in zip(read, numbers, strict=True) if number != own)

    def finish_weight_update(self) -> None:
        """Finish the update and let the trainer's memory go that does not stay."""
        self.loader.end()
        self._close([PASSING])

    def let_go(self) -> None:
        """Drop all references to the trainer's memory."""
        self._close(list(self._lent))
        self.loader.let_go()

    def _close(self, memories: list[int]) -> None:
        closed = [memory for memory in memories if memory in self._lent]
        if not closed:
            return
        if closed != [PASSING]:  # of which there are no views
            self.loader.let_go()
        lent = [StorageWeakRef(block.untyped_storage()) for memory in closed for block in self._lent[memory]]
        for memory in closed:
            del self._lent[memory]
            self._copies.pop(memory, None)
        if not all(storage.expired() for storage in lent):
            gc.collect()  # takes longer than the whole update otherwise, but the trainer waits for its memory
        torch.cuda.ipc_collect()

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Unused: a transport sends, in a process without vLLM."""
        raise NotImplementedError("weights are sent by lightning_megatron_rl.weights.transports")


def open_memory(handle: Handle, device: torch.device) -> Tensor:
    """Map memory of another process for `device`, also another GPU's where peer access allows.

    Torch opens it on the GPU that it is named, and takes it for that GPU's own: copies run there, and read no more than
    they need through NVLink.
    """
    own, owner = device.index, handle[DEVICE]
    if own != owner and torch.cuda.can_device_access_peer(own, owner):
        with suppress(RuntimeError):  # it is not to be had here
            return rebuild_cuda_tensor(*on_device(handle, own))
    return rebuild_cuda_tensor(*handle)


WeightTransferEngineFactory.register_engine(BACKEND, TransferEngine)


class WeightReceiver(SharedWeightsReceiver):
    """Methods that vLLM adds to each of its workers (`worker_extension_cls`); importing it registers the backend."""

    weight_transfer_engine: Any  # the worker's own, as are the next
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def memory_facts(self) -> dict[str, int]:
        """Bytes free on the worker's GPU, and bytes that sleeping can free."""
        from vllm.device_allocator.cumem import CuMemAllocator

        if not torch.cuda.is_available():
            return {"free": 0, "pooled": 0}
        return {"free": torch.cuda.mem_get_info()[0], "pooled": CuMemAllocator.get_instance().get_current_usage()}

    def borrow(self, weights: dict[str, LentWeight], memory: list[list[Handle | Tensor]]) -> int | None:
        """Open the memory that weights lie in, by what each worker opens it with; see `TransferEngine.borrow`."""
        engine = self.weight_transfer_engine
        place = engine.parallel_config.rank if len(memory) > 1 else 0  # in the trainer's process there is one
        read: int | None = engine.borrow(weights, memory[place])
        return read

    def let_go(self) -> None:
        """Drop all references to the trainer's memory."""
        self.weight_transfer_engine.let_go()

    def load_all(self, update_info: dict[str, Any]) -> None:
        """Begin an update and load its only part, perhaps beside what follows: one message to several workers."""
        self.start_weight_update()
        self.update_weights(update_info)

    def finish_update(self) -> bool:
        """Finish an update; whether it was copies that had been recorded in an earlier one."""
        self.finish_weight_update()
        return bool(self.weight_transfer_engine.loader.was_replayed)
