"""Megatron in one process on the CPU, without a launcher, a port or a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lightning_megatron_rl.compat.cpu import install_cpu_support


@contextmanager
def single_process() -> Iterator[None]:
    """Have Megatron's process groups inside, of this process alone, on the CPU."""
    install_cpu_support(torch.device("cpu"))
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0, force_reset_rng=True)  # modules ask for its tracker while they are built
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
