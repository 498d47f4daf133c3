"""Weights handed from the trainer to the engine's process through anonymous shared memory, never through a file.

The memory is a `memfd`: it has no name, so nothing stays behind in /dev/shm however the processes end, and it is not
bound by the size of /dev/shm, which containers keep at 64 MiB.
"""

import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_megatron_rl.weights.loader import reload_weights
from lightning_megatron_rl.weights.placement import Placement, aligned, view_all

HOST = "shared memory"  # the name of this way
INITIAL_BYTES = 1 << 20


class SharedWeights:
    """One full set of weights in shared memory; the layout is planned by the first `write` and replayed by the next."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("rollout-weights", os.MFD_CLOEXEC)
        self.plan: list[Placement] = []
        self._memory = self._map(INITIAL_BYTES)

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> list[Placement]:
        """Copy the tensors in as they come, so that only one of them need exist at a time, and return the plan.

        Args:
            weights: Names and tensors, CPU or CUDA.

        Raises:
            Exception: Whatever the iterable raises; the memory then holds a mixture of the old and the new weights.
        """
        count = 0
        for name, tensor in weights:
            shape = tuple(tensor.shape)
            if count < len(self.plan):
                slot = self.plan[count]
                if (slot.name, slot.dtype, slot.shape) != (name, tensor.dtype, shape):
                    del self.plan[count:]  # another list than last time: plan anew from here on
            if count == len(self.plan):
                end = self.plan[-1].end if self.plan else 0
                slot = Placement.packed(name, tensor, aligned(end))
                if slot.end > self._memory.numel():
                    self._memory = self._map(max(slot.end, 2 * self._memory.numel()))
                self.plan.append(slot)
            slot.view([self._memory]).copy_(tensor.detach())
            count += 1
        del self.plan[count:]
        return list(self.plan)

    def close(self) -> None:
        """Free the memory on this side."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        os.close(self.fd)

    def _map(self, num_bytes: int) -> Tensor:
        os.ftruncate(self.fd, num_bytes)  # pages are only taken when written to
        return torch.frombuffer(mmap.mmap(self.fd, num_bytes), dtype=torch.uint8)


def read_weights(path: str, plan: list[Placement]) -> Iterator[tuple[str, Tensor]]:
    """Yield views of the tensors that `plan` describes; they change with the next `write`, so copy what must stay.

    Args:
        path: The shared memory as a path, such as "/proc/self/fd/7".
        plan: What `SharedWeights.write` returned.
    """
    with open(path, "r+b") as file:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    yield from zip((slot.name for slot in plan), view_all(plan, [memory]), strict=True)


class SharedWeightsReceiver:
    """Methods that vLLM adds to each of its workers (`worker_extension_cls`)."""

    model_runner: Any  # the worker's own

    def load_shared_weights(self, path: str, plan: list[Placement]) -> None:
        """Load the weights layer by layer: on CPU vLLM repacks them, so that plain `load_weights` cannot."""
        reload_weights(self.model_runner, read_weights(path, plan))

    def memory_facts(self) -> dict[str, int]:
        """Bytes free on a GPU, and bytes that sleeping can free: none here, vLLM on CPU keeps its memory."""
        return {"free": 0, "pooled": 0}
