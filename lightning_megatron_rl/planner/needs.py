"""GPU memory that a rollout engine needs, as it describes itself."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.planner.memory import ModelSize, sampler_parts
from lightning_megatron_rl.planner.moments import Part


@dataclass(frozen=True)
class EngineNeeds:
    """What an engine needs beside a trainer on GPUs.

    Args:
        device: Where it samples: "cpu", "cuda", or "auto" for whichever vLLM is installed.
        dtype: Of its weights; "auto" is the checkpoint's.
        tensor_parallel_size: GPUs that share its model.
        kv_cache_memory_gb: Size of the key/value cache on each; None: it follows from `gpu_memory_utilization`. # GiB
        gpu_memory_utilization: Share of the GPU's memory for weights and cache, where the cache's size is None.
        devices: Its GPUs by number; None: those of its trainer and behind it.
        own_process: Whether it has processes of its own, else it is in the trainer's, on every rank.
        vllm: Whether the installed vLLM must fit torch and the machine.
        servers: That the run's replicas share and send weights to; 0: it is no pool of servers.
        bucket_bytes: Of a rank's GPU memory that messages to each take at most.
    """

    device: Literal["auto", "cpu", "cuda"] = "cuda"
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    kv_cache_memory_gb: float | None = None
    gpu_memory_utilization: float = 0.0
    devices: Sequence[int] | None = None
    own_process: bool = True
    vllm: bool = False
    servers: int = 0
    bucket_bytes: int = 0

    @property
    def on_gpu(self) -> bool:
        """Whether it takes GPUs, those of an "auto" device taken for one."""
        return self.device != "cpu"

    def dtype_of(self, stored: str) -> str:
        """Return what it samples in, of a checkpoint that is stored in one."""
        return stored if self.dtype == "auto" else self.dtype

    def element_bytes(self, stored: str) -> int:
        """Return the bytes of a weight, and of a number in the cache; see `dtype_of`."""
        return 4 if self.dtype_of(stored) == "float32" else 2

    def cache_tokens(self, size: ModelSize, stored: str, total: int | None = None) -> int | None:
        """Return the tokens that its key/value cache holds; None if that depends on `total`, which is None.

        Args:
            size: The model's.
            stored: The checkpoint's dtype.
            total: Memory of the GPU. # bytes
        """
        element = self.element_bytes(stored)
        if self.kv_cache_memory_gb is not None:
            cache = self.kv_cache_memory_gb * 2**30
        elif total is not None:
            weights = size.parameters * element / self.tensor_parallel_size
            cache = max(0.0, self.gpu_memory_utilization * total - weights)
        else:
            return None
        width = size.cache_width or size.key_value_width / self.tensor_parallel_size  # each GPU has all of a latent one
        return int(cache / (size.layers * width * element))

    def message_bytes(self, replicas: int, *, adapters: bool) -> int:
        """Return what messages with weights to its servers take of a rank's GPU at most.

        Args:
            replicas: That share the servers.
            adapters: Whether adapters are trained alone: one bucket goes to all servers then.

        Example:
            Five servers, two replicas, 256 MiB for each: 768 MiB; with adapters 256.
        """
        if adapters:
            return self.bucket_bytes
        return -(-self.servers // replicas) * self.bucket_bytes

    def engines_on(self, trainers: Sequence[int], firsts: Iterable[int]) -> Counter[int]:
        """Return how many engines have a worker on each GPU of a machine, by the GPU's number.

        Args:
            trainers: The GPU of each rank on the machine.
            firsts: Those of the ranks that start an engine, the first of each replica.
        """
        if not self.on_gpu:
            return Counter()
        if not self.own_process:
            return Counter(trainers)
        size = self.tensor_parallel_size
        return Counter(device for first in firsts for device in (self.devices or range(first, first + size)))

    def check_ranks(self, layout: ParallelLayout, replicas: int) -> None:
        """Refuse an engine in the trainer's processes that has not a worker on each rank of a replica, side by side.

        Args:
            layout: The trainer's.
            replicas: Of the model.

        Raises:
            ValueError: With the numbers and the remedy.
        """
        if self.own_process:
            return
        if self.tensor_parallel_size != layout.model_parallel_size:
            raise ValueError(
                f"engine.tensor_parallel_size={self.tensor_parallel_size} in the trainer's processes, with replicas of"
                f" tensor x pipeline x context = {layout.model_parallel_size} rank(s), each of which has one worker:"
                f" set it to {layout.model_parallel_size}, or use VLLMEngine"
            )
        if layout.pipeline_model_parallel_size > 1 and replicas > 1:
            raise ValueError(
                f"an engine in the trainer's processes with pipeline_model_parallel_size="
                f"{layout.pipeline_model_parallel_size} and {replicas} replicas, whose ranks are not neighbours: use"
                " VLLMEngine, or a layout without pipeline parallelism"
            )

    def parts(self, size: ModelSize, *, engines: int, stored: str, total: int) -> tuple[Part, ...]:
        """Return what they take of a GPU.

        Args:
            size: The model's.
            engines: Number of them that are on it.
            stored: The checkpoint's dtype.
            total: Memory of the GPU. # bytes
        """
        if not engines:
            return ()
        cache_gb = self.kv_cache_memory_gb
        return sampler_parts(
            size,
            tensor=self.tensor_parallel_size,
            total=total,
            utilization=self.gpu_memory_utilization,
            cache_bytes=None if cache_gb is None else int(cache_gb * 2**30),
            element_bytes=self.element_bytes(stored),
            own_process=self.own_process,
            engines=engines,
        )
