"""Moves a trainer's state to the host's memory while others need the device, and back."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer

OffloadPart = Literal["optimizer", "gradients", "parameters"]
PARTS: tuple[OffloadPart, ...] = get_args(OffloadPart)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OffloadReport:
    """Bytes and seconds of one move."""

    num_bytes: int  # of the device's memory
    seconds: float


@dataclass
class _Moved:
    storage: torch.UntypedStorage
    size: int  # bytes
    host: Tensor | None  # None: zeros when it comes back


@dataclass
class Offloader:
    """Frees and refills the storages of tensors; the tensors and their views stay valid.

    The host's copies are pinned where there is a GPU, and kept from one time to the next.

    Args:
        device: What is to be emptied; tensors elsewhere stay.
    """

    device: torch.device
    _away: dict[str, list[_Moved]] = field(default_factory=dict)
    _hosts: dict[int, Tensor] = field(default_factory=dict)  # by the storage's identity

    def offload(self, part: str, tensors: Iterable[Tensor], *, keep: bool = True) -> OffloadReport:
        """Free the memory of `tensors`; a part that is away already stays away.

        Args:
            part: A name for them.
            tensors: On any device; what they share is moved once.
            keep: Whether their values matter; otherwise they come back as zeros.
        """
        started = time.perf_counter()
        if part in self._away:
            return OffloadReport(0, 0.0)
        moved = []
        for storage in _storages(tensors, self.device):
            size = storage.nbytes()
            moved.append(_Moved(storage, size, self._copy_to_host(storage) if keep else None))
        self._wait()
        for move in moved:
            move.storage.resize_(0)
        self._away[part] = moved
        return OffloadReport(sum(move.size for move in moved), time.perf_counter() - started)

    def reload(self) -> OffloadReport:
        """Bring all parts back."""
        started = time.perf_counter()
        num_bytes = 0
        for moved in self._away.values():
            for move in moved:
                move.storage.resize_(move.size)
                block = _as_bytes(move.storage)
                if move.host is None:
                    block.zero_()
                else:
                    block.copy_(move.host, non_blocking=True)
                num_bytes += move.size
        self._wait()
        self._away.clear()
        return OffloadReport(num_bytes, time.perf_counter() - started)

    @property
    def away(self) -> tuple[str, ...]:
        """The parts that are in the host's memory."""
        return tuple(self._away)

    def _copy_to_host(self, storage: torch.UntypedStorage) -> Tensor:
        host = self._hosts.get(_identity(storage))
        if host is None or host.numel() != storage.nbytes():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            self._hosts[_identity(storage)] = host
        return host.copy_(_as_bytes(storage), non_blocking=True)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class OffloadedState:
    """Optimizer states, gradients and parameters of a run that can be offloaded while a sampler works.

    Args:
        parts: What may be moved, in this order.
    """

    def __init__(self, parts: Sequence[OffloadPart]) -> None:
        self.parts = tuple(parts)
        self._offloader: Offloader | None = None

    @property
    def away(self) -> tuple[str, ...]:
        """The parts that are in the host's memory."""
        return self._offloader.away if self._offloader is not None else ()

    def offload(
        self,
        wanted: Sequence[OffloadPart],
        device: torch.device,
        chunks: Sequence[nn.Module],
        optimizers: Sequence[MegatronOptimizer],
    ) -> OffloadReport:
        """Move the movable ones of `wanted` to the host's memory, and empty torch's cache.

        Args:
            wanted: Parts; those that are away already stay there.
            device: That is to be emptied.
            chunks: Of all models that are trained or saved.
            optimizers: Theirs.
        """
        if self._offloader is None or self._offloader.device != device:
            self._offloader = Offloader(device)
        moved = [part for part in self.parts if part in wanted and part not in self._offloader.away]
        reports = [
            self._offloader.offload(part, tensors_of(part, chunks, optimizers), keep=part != "gradients")
            for part in moved
        ]
        total = OffloadReport(sum(report.num_bytes for report in reports), sum(report.seconds for report in reports))
        _log_move("offloaded", moved, total)
        if device.type == "cuda":
            torch.cuda.ipc_collect()  # what was lent to other processes, and came back
            torch.cuda.empty_cache()
        return total

    def reload(self) -> OffloadReport:
        """Bring back all offloaded parts."""
        parts = self.away
        if self._offloader is None or not parts:
            return OffloadReport(0, 0.0)
        report = self._offloader.reload()
        _log_move("reloaded", parts, report)
        return report


def tensors_of(
    part: OffloadPart, chunks: Sequence[nn.Module], optimizers: Sequence[MegatronOptimizer]
) -> Iterator[Tensor]:
    """Return the tensors that a part consists of."""
    if part == "parameters":
        return parameter_tensors(chunks)
    if part == "gradients":
        return gradient_tensors(chunks)
    return optimizer_tensors(optimizers, chunks)


def parameter_tensors(chunks: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield parameters and buffers of wrapped or bare chunks, and the memory that data parallelism keeps them in."""
    from megatron.core.utils import unwrap_model

    for chunk in chunks:
        yield from chunk.parameters()
        yield from unwrap_model(chunk).buffers()  # data parallelism has another thing under this name
        yield from (buffer.param_data for buffer in _ddp_buffers(chunk) if buffer.param_data is not None)


def gradient_tensors(chunks: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield the gradient buffers of wrapped chunks."""
    for chunk in chunks:
        yield from (buffer.grad_data for buffer in _ddp_buffers(chunk) if buffer.grad_data is not None)


def optimizer_tensors(optimizers: Iterable[MegatronOptimizer], chunks: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Yield main parameters, states and averages of optimizers, except what lies in the chunks' own memory."""
    models = {
        _identity(storage) for storage in _storages([*parameter_tensors(chunks), *gradient_tensors(chunks)], None)
    }
    for optimizer in optimizers:
        for average in optimizer.averages.values():
            yield from average.tensors
        for part in optimizer.parts():
            if part.is_stub_optimizer:  # of a rank without parameters
                continue
            for tensor in _tensors([part.param_groups, list(part.optimizer.state.values())]):
                if _identity(tensor.untyped_storage()) not in models:
                    yield tensor


def _log_move(what: str, parts: Sequence[str], report: OffloadReport) -> None:
    if report.num_bytes:
        log.info("%s %s: %.3f GB in %.3f s", what, ", ".join(parts), report.num_bytes / 1e9, report.seconds)


def check_parts(parts: Sequence[str] | None) -> tuple[OffloadPart, ...]:
    """Return the parts in the order in which they are moved.

    Raises:
        ValueError: An unknown part.
    """
    unknown = [part for part in parts or () if part not in PARTS]
    if unknown:
        raise ValueError(f"offload_while_sampling={list(parts or ())}: {unknown} is none of {list(PARTS)}.")
    return tuple(part for part in PARTS if part in (parts or ()))


def _ddp_buffers(chunk: nn.Module) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel

    if not isinstance(chunk, DistributedDataParallel):
        return []
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _storages(tensors: Iterable[Tensor], device: torch.device | None) -> list[torch.UntypedStorage]:
    found = {}
    for tensor in tensors:
        if device is None or tensor.device.type == device.type:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found[_identity(storage)] = storage
    return list(found.values())


def _identity(storage: torch.UntypedStorage) -> int:
    """What stays while a storage is emptied and filled again."""
    return StorageWeakRef(storage).cdata


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
