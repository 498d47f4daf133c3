"""`OffloadsState`: the part of the strategy that clears its device for a sampler and takes the memory back."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_megatron_rl.strategy.offload import (
    Offloader,
    OffloadPart,
    OffloadReport,
    gradient_tensors,
    log_move,
    optimizer_tensors,
    parameter_tensors,
)
from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer
from lightning_megatron_rl.strategy.saving import DistributedCheckpointStrategy


class OffloadsState(DistributedCheckpointStrategy):
    """A strategy whose optimizer state, gradients and parameters can be away while a sampler has the device.

    What other models a module trains (`saved_with_model`) goes with its own.
    """

    offloads: tuple[OffloadPart, ...] = ()  # what may be moved, in this order
    _offloader: Offloader | None = None

    def offload(self, parts: Sequence[OffloadPart]) -> OffloadReport:
        """Move those of `parts` that the run offloads to the host's memory, and leave the device's free for others.

        Parameters may go when nobody reads them any more, after the weights were exported.

        Returns:
            Bytes and seconds; nothing is moved twice.

        Example:
            ``strategy.offload(["optimizer", "gradients"])``
        """
        if self._offloader is None or self._offloader.device != self.root_device:
            self._offloader = Offloader(self.root_device)
        moved = [part for part in self.offloads if part in parts and part not in self._offloader.away]
        reports = [self._offloader.offload(part, self._tensors_of(part), keep=part != "gradients") for part in moved]
        total = OffloadReport(sum(report.num_bytes for report in reports), sum(report.seconds for report in reports))
        log_move("offloaded", moved, total)
        self.release_cached_memory()
        return total

    def reload(self) -> OffloadReport:
        """Bring back whatever is away."""
        if self._offloader is None or not self._offloader.away:
            return OffloadReport(0, 0.0)
        parts = self._offloader.away
        report = self._offloader.reload()
        log_move("reloaded", parts, report)
        return report

    def release_cached_memory(self) -> None:
        """Give free memory that torch keeps for itself back to the device, where a sampler may want it."""
        if self.root_device.type == "cuda":
            torch.cuda.ipc_collect()  # what was lent to other processes, and came back
            torch.cuda.empty_cache()

    def _tensors_of(self, part: OffloadPart) -> Iterator[Tensor]:
        chunks = [*self.chunks, *(chunk for others in self.saved_with_model.values() for chunk in others)]
        if part == "parameters":
            return parameter_tensors(chunks)
        if part == "gradients":
            return gradient_tensors(chunks)
        optimizers = [optimizer for optimizer in self.optimizers if isinstance(optimizer, MegatronOptimizer)]
        return optimizer_tensors([*optimizers, *self.optimizers_saved_with_model.values()], chunks)
