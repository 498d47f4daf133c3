"""`VLLMEngine`: vLLM in a process of its own."""

import logging
import os
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_megatron_rl.planner.needs import EngineNeeds
from lightning_megatron_rl.rollout.model_directory import CheckpointLayout, SourceCheck
from lightning_megatron_rl.rollout.vllm.arguments import check_vllm_args
from lightning_megatron_rl.rollout.vllm.installation import (
    choose_device,
    installed_packages,
    require_library,
    why_no_gpu,
)
from lightning_megatron_rl.rollout.vllm.process import child_environment
from lightning_megatron_rl.rollout.vllm.settings import (
    ENGINE_RANGES,
    Dtype,
    compiles,
    current_device,
    engine_devices,
    engine_environment,
    llm_arguments,
    visible_device,
)
from lightning_megatron_rl.rollout.vllm.supervision import SupervisedEngine
from lightning_megatron_rl.utilities.cpus import openmp_defaults, sampler_threads, usable_cpus
from lightning_megatron_rl.utilities.masking import unmasked_environment
from lightning_megatron_rl.utilities.ranges import COUNT, COUNT_OR_NONE, POSITIVE, Range, check_ranges, check_words
from lightning_megatron_rl.utilities.spans import JOIN_S, SpanLog
from lightning_megatron_rl.weights.cuda_memory import identity, reach_each_other
from lightning_megatron_rl.weights.transports.base import Transport
from lightning_megatron_rl.weights.transports.host import SharedWeights
from lightning_megatron_rl.weights.transports.ipc import IPCTransport
from lightning_megatron_rl.weights.transports.nccl import NCCLTransport

log = logging.getLogger(__name__)

Device = Literal["auto", "cpu", "cuda"]
Compilation = Literal["auto", "full", "graphs"]
WeightTransfer = Literal["auto", "ipc", "nccl", "shared_memory"]


class VLLMEngine(SupervisedEngine):
    """Samples with vLLM in a process of its own, so that the trainer keeps its random numbers, patches and environment.

    A call that finds the process dead, or that it does not answer before its deadline (a process that is stopped never
    answers), starts another one, gives it the weights last pushed, and is repeated. Each such restart is a warning in
    the log; after `max_restarts` of them the engine gives up. A call that fails inside vLLM raises at once (an update
    is repeated), and the next call starts the new process.

    On CUDA weights go from GPU to GPU without a copy: a process that is replaced, or that slept at level 2, has none,
    and `generate` raises `WeightsLostError` until the next `update_weights`.

    Args:
        max_model_len: Longest prompt and response together. # [tokens]
        dtype: "auto" is the dtype in the model's config; "float32", "bfloat16" or "float16".
        device: "cpu", "cuda", or "auto" for whichever vLLM is installed.
        kv_cache_memory_gb: Size of the key/value cache; unset: 0.5 on CPU, from `gpu_memory_utilization` on CUDA. # GiB
        gpu_memory_utilization: Share of the GPU's memory for weights and cache, if `kv_cache_memory_gb` is unset; the
            rest is the trainer's.
        max_num_seqs: Most sequences that are sampled at a time.
        enforce_eager: No compilation and no CUDA graphs; unset: eager on CPU (starts much faster), graphs on CUDA.
        num_threads: CPU threads of each of the engine's processes; unset: OMP_NUM_THREADS if it is set, else one for
            every 10 million parameters, at most this rank's share of the CPUs that the process may use.
        compilation: Of the model on CUDA: "full" compiles it and records CUDA graphs, "graphs" records graphs alone,
            which starts some 25 s sooner and decodes a few percent slower (a small model: as fast). "auto" takes
            "graphs" for models below 500 million parameters and for runs that sample too little to win that back.
        tensor_parallel_size: GPUs (on CPU: processes) that share the model.
        devices: GPUs as the trainer numbers them; unset: the trainer's own and those behind it.
        sleep_level: Give the GPU's memory to the trainer between rollouts: 1 keeps the weights in the host's memory, 2
            drops them, so that every rollout begins with a weight sync. 0 keeps everything where it is.
        weight_transfer: "ipc" (the engine's processes read the trainer's memory, from another GPU where its own is none
            of theirs), "nccl" (only there), "shared_memory" (through the host; a restarted process finds its weights
            there), "auto" ("ipc" on the trainer's GPU, and on one other whose memory it reaches; else "nccl"), or a
            `Transport` of your own.
        bucket_mb: Size of the buffer for weights that come one by one, and for those of a whole model to several
            workers; a planned push of a split model has its own. # MiB
        start_timeout_s: Deadline of a start. # seconds
        call_timeout_s: Deadline of each call to generate or update, after which the process is replaced. # seconds
        max_restarts: Replacements of a failed process before the engine gives up.
        seed: vLLM's own seed; samples only depend on the seeds of their requests.
        env: Environment variables of the process, over all others. Values that look like secrets are written down as
            "***", which stands for the value that this process's environment has.
        vllm_args: Other arguments of vLLM's own, by their names in `vllm.EngineArgs`, such as
            ``{"max_num_batched_tokens": 8192}``; those that the engine sets itself, or that were not tested with
            updates, are refused.
        echo_output: Show the process's output.
    """

    def __init__(
        self,
        max_model_len: int = 2048,
        dtype: Dtype = "auto",
        device: Device = "auto",
        kv_cache_memory_gb: float | None = None,
        gpu_memory_utilization: float = 0.5,
        max_num_seqs: int = 256,
        enforce_eager: bool | None = None,
        compilation: Compilation = "auto",
        num_threads: int | None = None,
        tensor_parallel_size: int = 1,
        devices: list[int] | None = None,
        sleep_level: Literal[0, 1, 2] = 0,
        weight_transfer: WeightTransfer | Transport = "auto",
        bucket_mb: int = 512,
        start_timeout_s: float = 300,
        call_timeout_s: float = 600,
        max_restarts: int = 2,
        seed: int = 0,
        env: dict[str, str] | None = None,
        vllm_args: dict[str, Any] | None = None,
        echo_output: bool = False,
    ) -> None:
        ranges = {
            **ENGINE_RANGES,
            "num_threads": COUNT.called("unset, it follows from the size of the model"),
            "gpu_memory_utilization": Range(above=0, most=1),
            "devices": COUNT_OR_NONE.called("it is the number of a GPU"),
            "start_timeout_s": POSITIVE,
            "call_timeout_s": POSITIVE,
            "max_restarts": COUNT_OR_NONE,
        }
        check_ranges(ranges, locals(), "engine.")
        check_words({"dtype": Dtype, "device": Device, "compilation": Compilation}, locals(), "engine.")
        if isinstance(weight_transfer, str):
            check_words({"weight_transfer": WeightTransfer}, locals(), "engine.")
        check_vllm_args(vllm_args or {})
        self.compilation = compilation
        self.num_tokens: int | None = None  # that the run will sample, if that is known
        self.is_collective = False
        self.devices = devices
        self.sleep_level = sleep_level
        self.weight_transfer = weight_transfer
        self.bucket_mb = bucket_mb
        self.max_model_len = max_model_len
        self.dtype: str = dtype
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
        self.env = unmasked_environment(env or {})
        self.vllm_args = dict(vllm_args or {})
        self.echo_output = echo_output
        self.activity = SpanLog(JOIN_S)  # of all its processes
        self._forget()

    def start(self, model_path: str | Path) -> None:
        """Start the process and return while it loads; `wait_ready`, or the first call, waits for it.

        Raises:
            ValueError: The directory has no config or no safetensors weights; OMP_NUM_THREADS is invalid.
            RuntimeError: vLLM or a library of the system is missing, the wrong vLLM is installed, or it runs already.
        """
        if self._shared is not None:
            raise RuntimeError("the engine is already started; close() it before another start()")
        device = choose_device(self.device, installed_packages(), no_gpu=why_no_gpu())
        if device == "cpu":
            require_library("libnuma.so.1", "apt-get install libnuma1")
        self._layout = CheckpointLayout.read(model_path)
        self._check = SourceCheck(self._layout)
        eager = self.enforce_eager if self.enforce_eager is not None else device == "cpu"
        self._transport = None if isinstance(self.weight_transfer, str) else self.weight_transfer
        self._compiles = not eager and compiles(self.compilation, self._layout.num_parameters, self.num_tokens)
        self._llm_arguments = llm_arguments(
            self,
            str(model_path),
            device,
            stored_dtype=self._layout.dtype,
            eager=eager,
            architectures=self._layout.architectures,
            graphs_only=not (eager or self._compiles),
            extension=None if self._transport is None else self._transport.extension,
        )
        visible = self._choose_devices() if device == "cuda" else None
        self._threads = self._choose_threads() if device == "cpu" else None
        environment = engine_environment(
            device,
            self._layout.architectures,
            eager=eager,
            tensor_parallel_size=self.tensor_parallel_size,
            num_threads=self._threads,
            visible_devices=visible,
            dtype=self._llm_arguments["dtype"],
        )
        self._environment = child_environment(dict(os.environ), openmp_defaults() | environment | self.env)
        self._shared = SharedWeights()
        self._launch()

    def _choose_threads(self) -> int:
        """Return the threads of each process on the CPU; more than there are CPUs is a warning."""
        by_size = sampler_threads(self._layout.num_parameters, self.tensor_parallel_size, {**os.environ, **self.env})
        threads = self.num_threads or by_size
        cpus = usable_cpus()
        if threads * self.tensor_parallel_size > cpus.count:
            log.warning(
                "the sampler has %d process(es) with %d threads each for %d CPUs (%s), which will wait for each other:"
                " lower num_threads or OMP_NUM_THREADS",
                self.tensor_parallel_size,
                threads,
                cpus.count,
                cpus.source,
            )
        return threads

    def expect(self, num_tokens: int | None) -> None:
        """Learn how many tokens the run will sample at most; None: unknown."""
        self.num_tokens = num_tokens

    def describe(self) -> str:
        """Return what the engine is, for the table at start."""
        if self._shared is None:  # another rank has it
            return "vLLM in a process of its own"
        how = "eager" if self._llm_arguments["enforce_eager"] else "compiled" if self._compiles else "CUDA graphs alone"
        count = "" if self._threads is None else f", {self._threads} thread(s)"
        return f"vLLM in a process of its own, {self._llm_arguments['dtype']}, {how}{count}"

    def describe_needs(self) -> EngineNeeds | None:
        """Return what its processes take of GPUs."""
        return EngineNeeds(
            device=self.device,
            dtype=self.dtype,
            tensor_parallel_size=self.tensor_parallel_size,
            kv_cache_memory_gb=self.kv_cache_memory_gb,
            gpu_memory_utilization=self.gpu_memory_utilization,
            devices=self.devices,
            vllm=True,
        )

    def _choose_devices(self) -> str:
        """Choose GPUs and transport; return the process's CUDA_VISIBLE_DEVICES."""
        own, count = current_device(), torch.cuda.device_count()
        devices = engine_devices(self.devices, self.tensor_parallel_size, own, count)
        apart, wanted = own not in devices, self.weight_transfer
        seen = [*devices, own] if apart else devices  # by a process that reads the trainer's memory; its own in front
        reach = reach_each_other(seen)
        if wanted == "auto":
            wanted = "nccl" if apart and (self.tensor_parallel_size > 1 or not reach) else "ipc"
        if wanted == "nccl" and not apart:
            raise ValueError(
                f"weight_transfer='nccl' with the trainer on device {own} and the engine on {devices}: NCCL is for an"
                " engine that does not share the trainer's GPU; use weight_transfer='auto'"
            )
        if wanted == "ipc":
            if apart and not reach:
                raise ValueError(
                    f"weight_transfer='ipc' with the trainer on device {own} and the engine on {devices}: these"
                    " GPUs do not read each other's memory; use weight_transfer='auto'"
                )
            devices = seen
            gpus = [str(identity(torch.device("cuda", device))) for device in devices]
            self._transport = IPCTransport(
                devices.index(own), self.tensor_parallel_size, self.bucket_mb * 2**20, gpus=gpus if reach else ()
            )
        elif wanted == "nccl":
            self._transport = NCCLTransport(len(devices), self.call_timeout_s, self.bucket_mb * 2**20)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return ",".join(visible_device(device, visible) for device in devices)
