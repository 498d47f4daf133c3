"""vLLM's worker, which meets others without listening everywhere: imported by vLLM alone, in its processes."""

from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from torch import distributed as dist
from vllm.platforms import current_platform

from lightning_megatron_rl.parallel.rendezvous import LOOPBACK, local_store

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker

_TIMEOUT = timedelta(minutes=5)  # for the other workers to come


class LocalWorker(Worker):
    """vLLM's worker, which makes the default process group itself: on the loopback interface, or at node 0's address.

    vLLM makes none where there is one; its own would listen on all interfaces.
    """

    def init_device(self) -> Any:
        """Meet the other workers, then do what vLLM does."""
        if not dist.is_initialized():
            config = self.parallel_config
            address, port = LOOPBACK, urlparse(self.distributed_init_method).port or 0
            if config.nnodes > 1:
                address, port = config.master_addr, config.master_port
            world_size = config.world_size
            store = local_store(self.rank, world_size, port, _TIMEOUT, address=address)
            dist.init_process_group(current_platform.dist_backend, store=store, rank=self.rank, world_size=world_size)
        return super().init_device()
