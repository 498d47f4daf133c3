"""vLLM in the trainer's own processes: one worker per rank, weights copied in place."""

import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from lightning_megatron_rl.planner.needs import EngineNeeds
from lightning_megatron_rl.rollout.model_directory import CheckpointLayout, SourceCheck
from lightning_megatron_rl.rollout.protocol import (
    Generation,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
    SyncReport,
    WeightsLostError,
    check_requests,
    check_sleep,
    note_sleep,
)
from lightning_megatron_rl.rollout.vllm.arguments import check_vllm_args
from lightning_megatron_rl.rollout.vllm.installation import (
    choose_device,
    installed_packages,
    require_library,
    why_no_gpu,
)
from lightning_megatron_rl.rollout.vllm.process import named_memory
from lightning_megatron_rl.rollout.vllm.settings import (
    ENGINE_RANGES,
    FP32_ENVIRONMENT,
    Dtype,
    engine_environment,
    llm_arguments,
)
from lightning_megatron_rl.utilities.ranges import check_ranges, check_words
from lightning_megatron_rl.weights.cuda_memory import identity
from lightning_megatron_rl.weights.source import WeightSource
from lightning_megatron_rl.weights.transports.base import Sent
from lightning_megatron_rl.weights.transports.in_process import InProcess

if TYPE_CHECKING:
    from lightning_megatron_rl.rollout.vllm.worker import Worker

WEIGHTS, KV_CACHE = "weights", "kv_cache"
log = logging.getLogger(__name__)


@contextmanager
def isolated() -> Iterator[None]:
    """Restore random-number states, torch's settings and the environment, which vLLM changes."""
    environment = dict(os.environ)
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    on_cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    dtype, threads, matmul = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
    )
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(matmul)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_cuda is not None:
            torch.cuda.set_rng_state(on_cuda)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


class ColocatedVLLMEngine(RolloutEngine):
    """Samples with vLLM inside the trainer's processes: each rank of a model replica is one tensor-parallel worker.

    Nothing is sent anywhere: weights are copied on each rank's GPU, from the trainer's memory into the sampler's. In
    return a failure of vLLM is one of the run, and its patches of torch stay in the process; `VLLMEngine` keeps both
    apart. All ranks of a replica call it together, with the same requests.

    Args:
        tensor_parallel_size: Ranks that share the model: those of one model replica.
        max_model_len: Longest prompt and response together. # [tokens]
        dtype: "auto" is the dtype in the model's config; "float32", "bfloat16" or "float16".
        kv_cache_memory_gb: Size of the key/value cache of each rank. # GiB
        max_num_seqs: Most sequences that are sampled at a time.
        enforce_eager: No compilation and no CUDA graphs.
        sleep_level: Give the memory to the trainer between rollouts: 1 keeps the weights in the host's memory, 2 drops
            them, so that every rollout begins with a weight sync. 0 keeps everything where it is.
        bucket_mb: Size of the buffer for weights that come one by one; a planned push has its own. # MiB
        seed: vLLM's own seed; samples only depend on the seeds of their requests.
        vllm_args: Other arguments of vLLM's own, as in `VLLMEngine`.
    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        max_model_len: int = 2048,
        dtype: Dtype = "auto",
        kv_cache_memory_gb: float = 2.0,
        max_num_seqs: int = 256,
        enforce_eager: bool = True,
        sleep_level: Literal[0, 1, 2] = 0,
        bucket_mb: int = 512,
        seed: int = 0,
        vllm_args: dict[str, Any] | None = None,
    ) -> None:
        check_ranges(ENGINE_RANGES, locals(), "engine.")
        check_words({"dtype": Dtype}, locals(), "engine.")
        check_vllm_args(vllm_args or {})
        self.tensor_parallel_size = tensor_parallel_size
        self.max_model_len = max_model_len
        self.dtype: str = dtype
        self.kv_cache_memory_gb: float | None = kv_cache_memory_gb
        self.gpu_memory_utilization = 1.0  # the cache has a size
        self.max_num_seqs = max_num_seqs
        self.enforce_eager = enforce_eager
        self.sleep_level = sleep_level
        self.bucket_mb = bucket_mb
        self.seed = seed
        self.vllm_args = dict(vllm_args or {})
        self.is_collective = True
        self.weight_version = 0
        self._worker: Worker | None = None
        self._has_weights = False
        self._awake: set[str] = set()

    def describe_needs(self) -> EngineNeeds | None:
        """Return what its worker takes of each trainer's GPU."""
        return EngineNeeds(
            dtype=self.dtype,
            tensor_parallel_size=self.tensor_parallel_size,
            kv_cache_memory_gb=self.kv_cache_memory_gb,
            own_process=False,
            vllm=True,
        )

    def start(self, model_path: str | Path) -> None:
        """Load the model on this rank; a collective of all ranks of the run.

        Raises:
            ValueError: The directory has no config or no safetensors weights; ranks that do not divide into workers.
            RuntimeError: vLLM is missing, the wrong one is installed, or the engine runs already.
        """
        if self._worker is not None:
            raise RuntimeError("the engine is already started; close() it before another start()")
        device = choose_device("auto", installed_packages(), no_gpu=why_no_gpu())
        if device == "cpu":
            require_library("libnuma.so.1", "apt-get install libnuma1")
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size % self.tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} of the engine does not divide the {world_size}"
                " rank(s) of the run: it must be the number of ranks of one model replica"
            )
        self._layout = CheckpointLayout.read(model_path)
        self._check = SourceCheck(self._layout)
        arguments = llm_arguments(
            self,
            str(model_path),
            device,
            stored_dtype=self._layout.dtype,
            eager=self.enforce_eager,
            architectures=self._layout.architectures,
        )
        if device == "cuda" and self.tensor_parallel_size > torch.cuda.device_count():
            arguments["disable_custom_all_reduce"] = True  # vLLM's own reads the memory of GPUs of one node
        with isolated():
            # vLLM reads them where it is imported and where it starts; they are not the trainer's
            environment = engine_environment(device, eager=self.enforce_eager, dtype=arguments["dtype"])
            os.environ.update(environment | _ranks())
            from lightning_megatron_rl.rollout.vllm.worker import Worker

            worker = Worker(weights_fd=None)
            try:
                self._limits = worker.start({**arguments, "distributed_executor_backend": "external_launcher"})
            except BaseException:
                worker.stop()
                raise
            finally:
                if device == "cpu":
                    _drop_names()
        self._worker = worker
        self.activity = worker.activity
        self._device = device
        self._transport = InProcess(self.bucket_mb * 2**20, _readable_gpus() if device == "cuda" else {})
        # Triton reads them whenever it compiles a kernel
        self._kernels = {name: environment[name] for name in FP32_ENVIRONMENT if name in environment}
        self._awake, self._has_weights, self.weight_version = {WEIGHTS, KV_CACHE}, True, 0

    def wait_ready(self) -> None:
        """Ready when `start` returns."""
        self._started()

    def generate(self, requests: list[GenerationRequest], params: SamplingParams) -> list[list[Generation]]:
        """Sample `num_generations` responses for each request; all ranks of a replica with the same requests.

        Raises:
            ValueError: A request is refused; see `check_requests`.
            WeightsLostError: It slept at level 2 and has no weights since.
        """
        worker = self._started()
        if not requests:
            return []
        check_requests(requests, params, **self._limits)
        if not self._has_weights:
            raise WeightsLostError("the engine dropped its weights when it fell asleep; call update_weights")
        self.wake()
        with isolated():
            os.environ.update(self._kernels)
            return worker.generate(requests, params)[1]

    def update_weights(self, source: WeightSource, version: int) -> SyncReport:
        """Copy a full set of weights into the sampler's; on each rank its part.

        Raises:
            ValueError: The names or shapes differ from those of the model's directory.
        """
        began = time.perf_counter()
        worker = self._started()
        self.wake([WEIGHTS])
        self._has_weights = False
        if self._device == "cpu":
            with isolated():
                named = list(self._layout.check(source.tensors()))
                worker.reload(named, version)
            sent = Sent(sum(tensor.nbytes for _, tensor in named), 0, replayed=False)
        else:
            sent = self._transport.send(self._check(source), self._ask, version)
        self._has_weights, self.weight_version = True, version
        name, seconds = self._transport.name, time.perf_counter() - began
        log.info("weights of version %d: %.3f GB %s in %.3f s", version, sent.num_bytes / 1e9, name, seconds)
        return SyncReport(
            sent.num_bytes, seconds, sent.extra_bytes, name, sent.replayed, peer_bytes=self._transport.peer_bytes
        )

    def _ask(self, message: tuple[Any, ...], meanwhile: Callable[[], None] | None = None) -> Any:
        """Call a method of the worker, as an engine's process does with a message."""
        name, *values = message
        # copies that are prepared change nothing, and take less time than it takes to look after everything else
        is_replay = name == "replace" and values[0].borrowed
        with nullcontext() if is_replay else isolated():
            answer = getattr(self._started(), name)(*values)
        if meanwhile is not None:
            meanwhile()
        return answer

    def let_go(self) -> None:
        """Stop reading memory of an earlier update."""
        if self._worker is not None and self._device == "cuda":
            self._worker.let_go()
            self._transport.forget()

    def sleep(self, level: int = 1) -> int:
        """Free this rank's memory: 1 moves the weights to the host, 2 drops them; the cache is dropped by both."""
        worker = self._started()
        check_sleep(level, self.sleep_level)
        if not self._awake:
            return 0
        with isolated():
            freed, expected = worker.sleep(level)
        self._awake = set()
        self._has_weights = self._has_weights and level == 1
        note_sleep(level, freed, expected)
        return freed

    def wake(self, tags: list[str] | None = None) -> None:
        """Take memory again for "weights" and "kv_cache", both or one of them; the cache comes back empty."""
        wanted = {WEIGHTS, KV_CACHE} if tags is None else set(tags)
        if wanted - {WEIGHTS, KV_CACHE}:
            raise ValueError(f"wake(tags={tags}): {WEIGHTS!r} and {KV_CACHE!r} can wake")
        missing = sorted(wanted - self._awake, reverse=True)
        if missing:
            with isolated():
                self._started().wake(missing)
            self._awake |= wanted

    def close(self) -> None:
        """Free the model's memory; vLLM's changes to the process stay."""
        if self._worker is not None:
            try:
                self.let_go()
            finally:
                self._worker.stop()
                self._worker = None

    def _started(self) -> "Worker":
        if self._worker is None:
            raise RuntimeError("the engine is not started; call start(model_path) first")
        return self._worker


def _drop_names() -> None:
    """Unlink the shared memory of vLLM's CPU workers, which all have opened and nothing else removes."""
    for path in named_memory("self"):
        if "-cpushm_" in path.name:
            path.unlink(missing_ok=True)


def _readable_gpus() -> dict[str, int]:
    """Return the numbers of the GPUs whose memory this rank's reads, by identity."""
    own = torch.cuda.current_device()
    numbers = [n for n in range(torch.cuda.device_count()) if n == own or torch.cuda.can_device_access_peer(own, n)]
    return {str(identity(torch.device("cuda", number))): number for number in numbers}


def _ranks() -> dict[str, str]:
    """The variables of torchrun, which vLLM reads."""
    if not dist.is_initialized():
        return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    local = torch.cuda.current_device() if torch.cuda.is_available() else dist.get_rank()
    ranks: dict[str, Any] = {"RANK": dist.get_rank(), "LOCAL_RANK": local, "WORLD_SIZE": dist.get_world_size()}
    return {name: str(value) for name, value in ranks.items()}
