"""The arguments of vLLM and the environment of its process."""

import os
from collections.abc import Collection
from importlib.metadata import entry_points
from typing import Any, Literal, Protocol

import torch

from lightning_megatron_rl.utilities.ranges import COUNT, POSITIVE, SEED, Range
from lightning_megatron_rl.utilities.remote_code import trusts_remote_code
from lightning_megatron_rl.weights.transports.base import BACKEND

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CPU_EXTENSION = "lightning_megatron_rl.weights.transports.host.SharedWeightsReceiver"
LOCAL_WORKER = "lightning_megatron_rl.rollout.vllm.local_worker.LocalWorker"
CUDA_EXTENSION = "lightning_megatron_rl.weights.transports.receiver.WeightReceiver"
DEFAULT_CPU_KV_CACHE_GB = 0.5  # without a size vLLM reserves a fraction of all memory
CPU_PREFILL_TOKENS = 2048  # per scheduling step
# vLLM picks FlashInfer's sampler where it is installed, which compiles kernels when it first samples
CUDA_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
# Triton's kernels (attention, experts) multiply fp32 as TF32 by default, and log-probs are then off by some 4e-4
FP32_ENVIRONMENT = {"TRITON_F32_DEFAULT": "ieee"}
# vLLM takes its older model runner for most mixtures, which draws for one sequence with a seed after the other
NEWER_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
NEWER_RUNNER_MIXTURES = {"Qwen3MoeForCausalLM"}  # those that it was tested with
BF16_ON_CPU = {"GptOssForCausalLM"}  # vLLM's attention with sinks takes nothing else there
# To compile takes some 25 s (81 s against 58 s of a first start on an H100) and decodes a tenth faster at 0.6B; smaller
# models wait for Python either way. 12 million tokens are ten minutes of sampling at 20,000 tokens/s.
GRAPHS_ALONE = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
SMALL_MODEL = 500_000_000  # parameters
FEW_TOKENS = 12_000_000
MOST_TESTED = 4  # processes that shared one of them
ENGINE_RANGES = {
    "max_model_len": Range(least=2, whole=True, note="one token in and one token out"),
    "kv_cache_memory_gb": POSITIVE,
    "max_num_seqs": COUNT,
    "tensor_parallel_size": COUNT,
    "sleep_level": Range(least=0, most=2, whole=True, note="0 never sleeps, 1 moves weights to the host, 2 drops them"),
    "bucket_mb": COUNT,
    "seed": SEED,
}


class VLLMSettings(Protocol):
    """Settings that both engines have; `VLLMEngine` documents them."""

    dtype: str
    max_model_len: int
    max_num_seqs: int
    tensor_parallel_size: int
    kv_cache_memory_gb: float | None
    gpu_memory_utilization: float
    sleep_level: int
    seed: int
    vllm_args: dict[str, Any]


def llm_arguments(
    settings: VLLMSettings,
    model_path: str,
    device: str,
    *,
    stored_dtype: str,
    eager: bool,
    architectures: Collection[str] = (),
    graphs_only: bool = False,
    extension: str | None = None,
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`.

    Args:
        settings: An engine, whose `vllm_args` come last.
        model_path: Hugging Face directory.
        device: "cpu" or "cuda".
        stored_dtype: Of the checkpoint, which "auto" means; vLLM's own "auto" turns a float32 model into a 16-bit one.
        eager: No compilation and no CUDA graphs.
        architectures: Of the model, as its config names them.
        graphs_only: CUDA graphs of the model as it is, not of a compiled one.
        extension: Of the workers, by a transport that brings its own.

    Raises:
        ValueError: One of `vllm_args` does not work on a CPU, or the model not in this dtype there.
    """
    cache_gb = settings.kv_cache_memory_gb
    arguments: dict[str, Any] = {
        "model": model_path,
        # by itself vLLM takes params.json, consolidated*.safetensors and Mistral's tokenizer where a release has both
        "config_format": "hf",
        "load_format": "hf",
        "tokenizer_mode": "hf",
        "dtype": stored_dtype if settings.dtype == "auto" else settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "enforce_eager": eager,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "seed": settings.seed,
        "trust_remote_code": trusts_remote_code(),
        "worker_cls": LOCAL_WORKER,
        "logprobs_mode": "processed_logprobs",  # the default leaves the temperature out
        "generation_config": "vllm",  # none of the model's own sampling defaults
        "enable_prefix_caching": True,
    }
    if device == "cpu":
        cache_gb = cache_gb or DEFAULT_CPU_KV_CACHE_GB
        least_batched = max(settings.max_model_len, settings.max_num_seqs)
        _check_for_cpu(settings, least_batched)
        _check_dtype_on_cpu(settings.dtype, arguments["dtype"], architectures)
        arguments["worker_extension_cls"] = extension or CPU_EXTENSION
        # A prompt prefilled in parts makes vLLM rewind the request's generator, which CPU generators cannot do.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(least_batched, CPU_PREFILL_TOKENS)
    else:
        arguments["worker_extension_cls"] = extension or CUDA_EXTENSION
        if extension is None:
            arguments["weight_transfer_config"] = {"backend": BACKEND}
        arguments["enable_sleep_mode"] = settings.sleep_level > 0
        if graphs_only:
            arguments["compilation_config"] = GRAPHS_ALONE
        # given the cache's size, vLLM uses the share only to refuse a GPU where less than that is free
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization if cache_gb is None else 0.01
    if cache_gb is not None:
        arguments["kv_cache_memory_bytes"] = int(cache_gb * 2**30)
    return arguments | settings.vllm_args


def _check_for_cpu(settings: VLLMSettings, least_batched: int) -> None:
    if settings.vllm_args.get("enable_chunked_prefill"):
        raise ValueError(
            "engine.vllm_args: enable_chunked_prefill=True on a CPU: vLLM would rewind a request's random numbers,"
            " which generators on a CPU cannot do. Leave it out."
        )
    batched = settings.vllm_args.get("max_num_batched_tokens")
    if batched is not None and batched < least_batched:
        raise ValueError(
            f"engine.vllm_args: max_num_batched_tokens={batched} on a CPU must be at least max_model_len"
            f" ({settings.max_model_len}) and max_num_seqs ({settings.max_num_seqs}): a prompt is not prefilled in"
            " parts there."
        )


def _check_dtype_on_cpu(wanted: str, dtype: str, architectures: Collection[str]) -> None:
    if dtype != "bfloat16" and (found := sorted(BF16_ON_CPU.intersection(architectures))):
        raise ValueError(
            f"engine.dtype={wanted!r} is {dtype} for {found[0]}, which vLLM samples in bfloat16 alone on a CPU: set"
            " engine.dtype to bfloat16 (of a server, --dtype bfloat16)"
        )


def compiles(wanted: str, num_parameters: int, num_tokens: int | None) -> bool:
    """Return whether the model is compiled: as the user wants, else if that is quicker over the whole run.

    Args:
        wanted: "full", "graphs" or "auto".
        num_parameters: Of the model.
        num_tokens: That the run will sample at most; None: unknown.
    """
    if wanted != "auto":
        return wanted == "full"
    return num_parameters >= SMALL_MODEL and (num_tokens is None or num_tokens >= FEW_TOKENS)


def engine_environment(
    device: str,
    architectures: Collection[str] = (),
    *,
    eager: bool,
    tensor_parallel_size: int = 1,
    num_threads: int | None = None,
    visible_devices: str | None = None,
    dtype: str | None = None,
) -> dict[str, str]:
    """Return the variables that vLLM's process gets beside its parent's.

    Args:
        device: "cpu" or "cuda".
        architectures: Of the model, as its config names them; none: vLLM chooses its model runner.
        eager: No compilation.
        tensor_parallel_size: Processes that share the model.
        num_threads: CPU threads of each process; None: those of this process.
        visible_devices: The CUDA_VISIBLE_DEVICES of the process.
        dtype: Of the weights.
    """
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
        if num_threads is not None:
            environment["OMP_NUM_THREADS"] = str(num_threads)
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the trainer's threads use the same cores
        if eager:
            environment["TORCHDYNAMO_DISABLE"] = "1"  # enforce_eager alone still compiles while warming up
    else:
        defaults = dict(CUDA_ENVIRONMENT)
        tested = tensor_parallel_size <= MOST_TESTED and NEWER_RUNNER_MIXTURES.intersection(architectures)
        # it refuses to start where processors of logits are installed
        if tested and not entry_points(group="vllm.logits_processors"):
            defaults |= NEWER_RUNNER
        if dtype == "float32":
            defaults |= FP32_ENVIRONMENT
        environment |= {name: os.environ.get(name, value) for name, value in defaults.items()}
        if visible_devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible_devices
    return environment


def visible_device(index: int, visible: str | None) -> str:
    """Return the CUDA_VISIBLE_DEVICES that shows a child this process's device `index` alone.

    Example:
        ``visible_device(1, "4,6") == "6"`` and ``visible_device(1, None) == "1"``
    """
    return visible.split(",")[index].strip() if visible else str(index)


def engine_devices(wanted: list[int] | None, tensor_parallel_size: int, own: int, count: int) -> list[int]:
    """Return the CUDA devices of an engine, as its trainer numbers them.

    Args:
        wanted: What the user asked for; None: the trainer's own and those behind it.
        tensor_parallel_size: How many are needed.
        own: The trainer's device.
        count: Devices of the machine.

    Raises:
        ValueError: Too few, too many, or one that does not exist.

    Example:
        ``engine_devices(None, 2, own=2, count=4) == [2, 3]``
    """
    devices = list(range(own, own + tensor_parallel_size)) if wanted is None else wanted
    if len(devices) != tensor_parallel_size or len(set(devices)) != len(devices):
        raise ValueError(
            f"devices={devices}: tensor_parallel_size={tensor_parallel_size} needs as many different devices"
        )
    missing = [device for device in devices if not 0 <= device < count]
    if missing:
        raise ValueError(
            f"the engine wants devices {devices} (its trainer has device {own}), but there are {count}:"
            f" {missing} do(es) not exist. Lower tensor_parallel_size={tensor_parallel_size} or name other devices."
        )
    return devices


def current_device() -> int:
    """This process's CUDA device."""
    return torch.cuda.current_device()
