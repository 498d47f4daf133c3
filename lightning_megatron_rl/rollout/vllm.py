"""vLLM as a rollout engine: one child process, restarted with the right weights when it fails."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lightning_megatron_rl.rollout.checkpoint import CheckpointLayout
from lightning_megatron_rl.rollout.engine import (
    Generation,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
    check_requests,
)
from lightning_megatron_rl.rollout.installation import choose_device, installed_packages, require_library
from lightning_megatron_rl.rollout.process import (
    EngineCallError,
    EngineDiedError,
    EngineTimeoutError,
    WorkerProcess,
    child_environment,
)
from lightning_megatron_rl.rollout.shared_weights import SharedWeights, Slot

WORKER_MODULE = "lightning_megatron_rl.rollout.vllm_worker"
WORKER_EXTENSION = "lightning_megatron_rl.rollout.shared_weights.SharedWeightsReceiver"
DEFAULT_CPU_KV_CACHE_GB = 0.5  # without a size vLLM reserves a fraction of all memory
CPU_PREFILL_TOKENS = 2048  # per scheduling step

T = TypeVar("T")


class VLLMEngine(RolloutEngine):
    """Samples with vLLM in a process of its own, so that the trainer keeps its random numbers, patches and environment.

    A call that finds the process dead starts another one, gives it the weights last pushed, and is repeated; after
    `max_restarts` of them the engine gives up. A call that outlasts its deadline or fails inside vLLM raises at once
    (an update is repeated), and the next call starts the new process.

    Args:
        max_model_len: Longest prompt and response together. # [tokens]
        dtype: "auto" is the dtype in the model's config; "float32", "bfloat16" or "float16".
        device: "cpu", "cuda", or "auto" for whichever vLLM is installed.
        kv_cache_memory_gb: Size of the key/value cache; unset: 0.5 on CPU, from `gpu_memory_utilization` on CUDA. # GiB
        gpu_memory_utilization: Share of the GPU's memory for weights and cache, if `kv_cache_memory_gb` is unset; the
            rest is the trainer's.
        max_num_seqs: Most sequences that are sampled at a time.
        enforce_eager: No compilation and no CUDA graphs; unset: eager on CPU (starts much faster), graphs on CUDA.
        num_threads: CPU threads of the engine; unset: every core that this process may use.
        tensor_parallel_size: GPUs (on CPU: processes) that share the model.
        start_timeout_s: Deadline of a start. # seconds
        call_timeout_s: Deadline of each call to generate or update. # seconds
        max_restarts: Replacements of a failed process before the engine gives up.
        seed: vLLM's own seed; samples only depend on the seeds of their requests.
        env: Environment variables of the process, over all others.
        echo_output: Show the process's output.

    Example:
        ``engine = VLLMEngine(max_model_len=512); engine.start("Qwen3-0.6B"); engine.generate(requests, params)``
    """

    def __init__(
        self,
        max_model_len: int = 2048,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        device: Literal["auto", "cpu", "cuda"] = "auto",
        kv_cache_memory_gb: float | None = None,
        gpu_memory_utilization: float = 0.5,
        max_num_seqs: int = 256,
        enforce_eager: bool | None = None,
        num_threads: int | None = None,
        tensor_parallel_size: int = 1,
        start_timeout_s: float = 300,
        call_timeout_s: float = 600,
        max_restarts: int = 2,
        seed: int = 0,
        env: dict[str, str] | None = None,
        echo_output: bool = False,
    ) -> None:
        for name, value, least in (
            ("max_model_len", max_model_len, 2),  # one token in, one token out
            ("max_num_seqs", max_num_seqs, 1),
            ("tensor_parallel_size", tensor_parallel_size, 1),
            ("max_restarts", max_restarts, 0),
        ):
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads={num_threads} must be at least 1, or unset for every core")
        if kv_cache_memory_gb is not None and kv_cache_memory_gb <= 0:
            raise ValueError(f"kv_cache_memory_gb={kv_cache_memory_gb} must be positive, or unset")
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization={gpu_memory_utilization} must be in (0, 1]")
        if start_timeout_s <= 0 or call_timeout_s <= 0:
            raise ValueError(f"start_timeout_s={start_timeout_s}, call_timeout_s={call_timeout_s} must be positive")
        self.max_model_len = max_model_len
        self.dtype = dtype
        self.device = device
        self.kv_cache_memory_gb = kv_cache_memory_gb
        self.gpu_memory_utilization = gpu_memory_utilization
        self.max_num_seqs = max_num_seqs
        self.enforce_eager = enforce_eager
        self.num_threads = num_threads
        self.tensor_parallel_size = tensor_parallel_size
        self.start_timeout_s = start_timeout_s
        self.call_timeout_s = call_timeout_s
        self.max_restarts = max_restarts
        self.seed = seed
        self.env = env or {}
        self.echo_output = echo_output
        self._forget()

    def _forget(self) -> None:
        self.weight_version = 0
        self.num_restarts = 0
        self._worker: WorkerProcess | None = None
        self._limits: dict[str, int] | None = None  # of the worker; None until it has said that it is ready
        self._shared: SharedWeights | None = None
        self._failures: list[Exception] = []
        # Pushes are numbered from 1; 0 stands for the weights in the model's directory.
        self._num_pushes = 0
        self._wanted_push = 0  # what should sample
        self._wanted_version = 0
        self._shared_push: int | None = None  # what the shared memory holds; None: nothing whole
        self._worker_push = 0  # what the worker has loaded
        self._worker_plan: list[Slot] | None = None  # what the worker knows of the shared memory's layout

    @property
    def pid(self) -> int | None:
        """Process id of the engine's process, if there is one."""
        return None if self._worker is None or self._worker.is_gone else self._worker.pid

    def start(self, model_path: str | Path) -> None:
        """Start the process and return while it loads; `wait_ready`, or the first call, waits for it.

        Raises:
            ValueError: The directory has no config or no safetensors weights.
            RuntimeError: vLLM or a library of the system is missing, the wrong vLLM is installed, or it runs already.
        """
        if self._shared is not None:
            raise RuntimeError("the engine is already started; close() it before another start()")
        device = choose_device(self.device, installed_packages(), has_cuda=torch.cuda.is_available())
        if device == "cpu":
            require_library("libnuma.so.1", "apt-get install libnuma1")
        self._layout = CheckpointLayout.read(model_path)
        eager = self.enforce_eager if self.enforce_eager is not None else device == "cpu"
        self._llm_arguments = self._build_llm_arguments(str(model_path), device, eager=eager)
        self._environment = child_environment(dict(os.environ), self._build_environment(device, eager=eager) | self.env)
        self._shared = SharedWeights()
        self._launch()

    def wait_ready(self) -> None:
        """Block until the process can sample with the weights last pushed.

        Raises:
            RuntimeError: It cannot start, did not start in time, or failed more often than `max_restarts`.
        """
        self._retrying(lambda worker: None)

    def generate(self, requests: list[GenerationRequest], params: SamplingParams) -> list[list[Generation]]:
        """Sample `num_samples` responses for each request.

        Raises:
            ValueError: A request is refused; see `check_requests`.
            RuntimeError: The call failed in vLLM, outlasted `call_timeout_s`, or the process failed too often.
        """

        def call(worker: WorkerProcess) -> list[list[Generation]]:
            assert self._limits is not None
            check_requests(requests, params, **self._limits)
            return worker.request("generate", ("generate", requests, params), self.call_timeout_s)

        return self._retrying(call) if requests else []

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Push a full set of weights and clear the prefix cache; the version counts from the moment they are loaded.

        The tensors are copied into shared memory as they come. If the iterable raises or the set is not the model's,
        the old weights go on sampling; should the process then have to be replaced, they are gone with it, and
        `generate` asks for a new update.

        Args:
            weights: Hugging Face names and whole tensors, on CPU or CUDA, in any dtype.
            version: Becomes `weight_version`.

        Raises:
            ValueError: The names or shapes differ from those of the model's directory.
            RuntimeError: The process failed more often than `max_restarts`, or outlasted `call_timeout_s`.
        """
        shared = self._started()
        self._shared_push = None
        shared.write(self._layout.check(weights))
        self._num_pushes += 1
        self._shared_push = self._wanted_push = self._num_pushes
        self._wanted_version = version
        self.wait_ready()

    def close(self) -> None:
        """End the process and free the shared memory; the engine can be started again."""
        if self._worker is not None:
            self._worker.close(grace_s=5.0 if self._limits else 0.0)  # while it loads it does not listen
        if self._shared is not None:
            self._shared.close()
        self._forget()

    def _retrying(self, call: Callable[[WorkerProcess], T]) -> T:
        """Run `call` on a worker that has the wanted weights, on a new one whenever the process died."""
        self._started()
        while True:
            try:
                return call(self._ready_worker())
            except EngineDiedError as error:
                self._failures.append(error)
            except (EngineTimeoutError, EngineCallError) as error:
                self._failures.append(error)
                raise

    def _ready_worker(self) -> WorkerProcess:
        if self._worker is None or self._worker.is_gone:
            self._relaunch()
        assert self._worker is not None
        if self._limits is None:
            remaining = self._worker.launched_at + self.start_timeout_s - time.monotonic()
            self._limits = self._worker.receive("start", remaining)
        if self._worker_push != self._wanted_push:
            self._push(self._worker)
        return self._worker

    def _push(self, worker: WorkerProcess) -> None:
        assert self._shared is not None
        plan = list(self._shared.plan)
        try:
            news = None if plan == self._worker_plan else plan
            worker.request("update_weights", ("update", news), self.call_timeout_s)
        except EngineCallError as error:  # a failed reload leaves layers without weights: only a new process helps
            raise EngineDiedError(str(error)) from error
        self._worker_plan = plan
        self._worker_push = self._wanted_push
        self.weight_version = self._wanted_version

    def _launch(self) -> None:
        assert self._shared is not None
        self._limits = None
        self._worker_push, self._worker_plan = 0, None
        self._worker = WorkerProcess(
            WORKER_MODULE, self._environment, inherited_fds=(self._shared.fd,), echo_output=self.echo_output
        )
        self._worker.send("start", ("start", self._llm_arguments), self.start_timeout_s)

    def _relaunch(self) -> None:
        if self._wanted_push != 0 and self._shared_push != self._wanted_push:
            raise RuntimeError(
                f"the weights of version {self._wanted_version} went with the engine's process, and the update after "
                "them was never complete; call update_weights with a full set of weights"
            )
        if self.num_restarts >= self.max_restarts:
            last = self._failures[-1] if self._failures else None  # None: it was interrupted
            raise RuntimeError(
                f"the vLLM engine needs restart {self.num_restarts + 1} of max_restarts={self.max_restarts} and gives "
                f"up; raise max_restarts if what ended it was an accident; the last failure: {last}"
            ) from last
        self.num_restarts += 1
        self._launch()

    def _started(self) -> SharedWeights:
        if self._shared is None:
            raise RuntimeError("the engine is not started; call start(model_path) first")
        return self._shared

    def _build_llm_arguments(self, model_path: str, device: str, *, eager: bool) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": model_path,
            # vLLM's own "auto" turns a float32 model into a 16-bit one.
            "dtype": self._layout.dtype if self.dtype == "auto" else self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "enforce_eager": eager,
            "tensor_parallel_size": self.tensor_parallel_size,
            "seed": self.seed,
            "logprobs_mode": "processed_logprobs",  # the default leaves the temperature out
            "generation_config": "vllm",  # none of the model's own sampling defaults
            "worker_extension_cls": WORKER_EXTENSION,
            "enable_prefix_caching": True,
        }
        kv_cache_gb = self.kv_cache_memory_gb
        if device == "cpu":
            kv_cache_gb = kv_cache_gb or DEFAULT_CPU_KV_CACHE_GB
            # A prompt prefilled in parts makes vLLM rewind the request's generator, which CPU generators cannot do.
            arguments["enable_chunked_prefill"] = False
            arguments["max_num_batched_tokens"] = max(self.max_model_len, self.max_num_seqs, CPU_PREFILL_TOKENS)
        if kv_cache_gb is not None:
            arguments["kv_cache_memory_bytes"] = int(kv_cache_gb * 2**30)
        if device == "cuda":
            # given the cache's size, vLLM uses the share only to refuse a GPU where less than that is free
            arguments["gpu_memory_utilization"] = self.gpu_memory_utilization if kv_cache_gb is None else 0.01
        return arguments

    def _build_environment(self, device: str, *, eager: bool) -> dict[str, str]:
        environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core inside the process that we watch
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",  # the model is a directory
            "VLLM_HOST_IP": "127.0.0.1",  # where its processes meet; it would ask the network for its address
        }
        if device == "cpu":
            environment["OMP_NUM_THREADS"] = str(self.num_threads or len(os.sched_getaffinity(0)))
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the trainer's threads use the same cores
            if eager:
                environment["TORCHDYNAMO_DISABLE"] = "1"  # enforce_eager alone still compiles while warming up
        elif self.tensor_parallel_size == 1:
            environment["CUDA_VISIBLE_DEVICES"] = visible_device(
                torch.cuda.current_device(), os.environ.get("CUDA_VISIBLE_DEVICES")
            )
        return environment


def visible_device(index: int, visible: str | None) -> str:
    """Return the CUDA_VISIBLE_DEVICES that shows a child this process's device `index` alone.

    Example:
        ``visible_device(1, "4,6") == "6"`` and ``visible_device(1, None) == "1"``
    """
    return visible.split(",")[index].strip() if visible else str(index)
