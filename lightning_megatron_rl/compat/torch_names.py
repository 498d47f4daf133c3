"""What torch has under private names only; docs/private_apis.md says why each is needed."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves


def changes_arguments(operation: Any) -> bool:
    """Return whether an operation, as a `TorchDispatchMode` gets it, writes to a tensor that it is given."""
    return bool(operation._schema.is_mutable)


def assert_on_device(condition: Tensor, message: str) -> None:
    """Fail on the device if `condition` is false, without waiting for the device."""
    torch._assert_async(condition, message)


def scheduler_parts(scheduler: Any) -> list[Any]:
    """Return the learning-rate schedulers that one is made of; `state_dict` has theirs under the same name."""
    return list(getattr(scheduler, "_schedulers", []))


def is_in_backward() -> bool:
    """Return whether a backward pass runs in this thread, in which only what is recomputed has a forward pass."""
    return torch._C._current_graph_task_id() != -1


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, in a few kernels."""
    torch._foreach_copy_(targets, sources)  # type: ignore[arg-type]


def count_cuda_devices() -> int:
    """Return the number of devices that CUDA can use, whatever NVML counts."""
    return torch._C._cuda_getDeviceCount()


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return how long a group waits for its ranks; None: unknown, torch's default applies."""
    options = getattr(group._get_backend(device), "options", None)
    found: timedelta | None = getattr(options, "_timeout", None)
    return found


def nccl_options(timeout: timedelta) -> Any:
    """Return the options of a group of NCCL whose collectives fail after `timeout`."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def exchange_at_once(group: Any, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Any:
    """Begin to send to, and to receive from, other processes of a group of NCCL, as one work in its one communicator.

    Args:
        group: A `ProcessGroupNCCL`.
        sends: Tensors on the device, and the process that each goes to.
        receives: The same, with the process that each comes from.
    """
    group._start_coalescing()
    try:
        for tensor, other in sends:
            group.send([tensor], other, 0)
        for tensor, other in receives:
            group.recv([tensor], other, 0)
    finally:  # or later work of this thread would wait for the end
        work = group._end_coalescing()
    return work


def own_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's own parameters and persistent buffers, without its submodules'."""
    state: dict[str, Any] = {}
    module._save_to_state_dict(state, "", keep_vars=False)
    return state


def record_memory(max_entries: int | None) -> None:
    """Record allocations on the GPU, at most so many; None ends it."""
    if max_entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=max_entries)


def write_memory_record(file: str) -> None:
    """Write the allocations that were recorded."""
    torch.cuda.memory._dump_snapshot(file)


def storage_at(block: Tensor) -> Any:
    """Return a storage of its own of the memory of a block, ``[bytes]`` uint8."""
    return torch._C._construct_storage_from_data_pointer(block.data_ptr(), block.device, block.numel())


def release_reader(counter: Sequence[Any]) -> None:
    """Count off a reader of memory that CUDA IPC has shared.

    Args:
        counter: The file with the count, and the place in it.
    """
    torch.UntypedStorage._release_ipc_counter_cuda(*counter)
