"""GPU memory that another process maps by CUDA IPC: handles, and which GPUs reach it."""

import atexit
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_megatron_rl.compat.torch_names import release_reader, storage_at
from lightning_megatron_rl.utilities.files import driver_files, remove_files

Handle = tuple[Any, ...]  # torch's arguments to open memory of another process

# places in what torch rebuilds a tensor of another process from
DEVICE = 6  # the device's number
_COUNTER = 11  # the file with the count of readers, and the place in it


def whole_storage(tensor: Tensor) -> Tensor:
    """Return all bytes of the memory that a tensor lies in, ``[bytes]`` uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload,no-any-return]


def lend(block: Tensor, device: int) -> Handle:
    """Return a handle of the block's memory for one process, a reader in torch's count until it lets go.

    Whenever torch shares a storage, it wraps it once more, with a count of its readers in a file of shared memory that
    stays for as long as the storage lives: parameters would collect one for each sync of the run. So what is shared is
    a storage of its own of the same memory, whose count goes when the reader has let go.

    Args:
        block: ``[bytes]`` uint8, on a GPU.
        device: Number by which the reader knows that GPU.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    _remove_driver_files_at_exit()
    lent = torch.empty(0, dtype=torch.uint8, device=block.device).set_(storage_at(block))  # type: ignore[call-overload]
    return on_device(tuple(reduce_tensor(lent)[1]), device)


@cache
def _remove_driver_files_at_exit() -> None:
    atexit.register(lambda: remove_files(driver_files(os.getpid())))


def on_device(handle: Handle, device: int) -> Handle:
    """Return the handle for a reader that knows the GPU by another number."""
    return (*handle[:DEVICE], device, *handle[DEVICE + 1 :])


def take_back(handle: Handle) -> None:
    """Count a reader off that has ended and cannot do so itself."""
    release_reader(handle[_COUNTER : _COUNTER + 2])


def identity(device: torch.device) -> str | None:
    """Return an id of a GPU that is the same in every process; None: it is not a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def reach_each_other(devices: Sequence[int]) -> bool:
    """Whether each of these GPUs reads the memory of all others."""
    pairs = ((one, other) for one in devices for other in devices if one != other)
    return all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)
