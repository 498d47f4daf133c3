"""Megatron in one process on the CPU, without a launcher, a port or a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_megatron_rl.compat.cpu import install_cpu_support
from lightning_megatron_rl.strategy.layout import ParallelLayout

_STATUS = Path("/proc/self/status")
_TIMEOUT_S = 600.0  # nobody else takes part in the groups' collectives


@contextmanager
def single_process() -> Iterator[None]:
    """Have Megatron's process groups inside, of this process alone, on the CPU.

    Example:
        ``with single_process(): chunks = model.build_chunks(...)``
    """
    install_cpu_support(torch.device("cpu"))
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ParallelLayout().initialize(_TIMEOUT_S)
        model_parallel_cuda_manual_seed(0, force_reset_rng=True)  # modules ask for its tracker while they are built
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def peak_memory_gb() -> float:
    """Return the most memory that this program has had in RAM, files that it has mapped included, in GB.

    `getrusage` would begin with the peak of the program that started this one.
    """
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e9  # Linux counts KiB
