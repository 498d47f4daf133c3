"""The versions this project runs with, and the tools of the machine around them."""

import ctypes
import importlib.util
import operator
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightning_megatron_rl.devices.commands import capture
from lightning_megatron_rl.rewards.sandbox import MEANING, Sandbox, SandboxError
from lightning_megatron_rl.utilities.cpus import OthersLoad, usable_cpus
from lightning_megatron_rl.utilities.versions import installed_version

# as pyproject.toml has them, which a test compares; those of the sampler and of Transformer Engine depend on the device
REQUIRED = {
    "torch": "==2.11.0",
    "lightning": ">=2.6.6,<2.7",
    "jsonargparse": ">=4.46,<5",
    "megatron-core": "==0.19.2",
    "megatron-bridge": "==0.6.2",
    "transformers": ">=5.8,<=5.12.1",
    "omegaconf": ">=2.3",
    "psutil": ">=6",
    "pyyaml": ">=6",
    "datasets": ">=4",
    "math-verify": ">=0.8",
    "rich": ">=13",
    "jsonschema": ">=4.23",
    "aiohttp": ">=3.13",
    "plotly": ">=6.3",
}
_COMPARISONS = {"==": operator.eq, ">=": operator.ge, "<=": operator.le, "<": operator.lt}
VLLM = "==0.26.0"
TRANSFORMER_ENGINE = ">=2.20.2,<2.21"
LOAD_SECONDS = 1.0  # over which the load of other processes is measured


@dataclass(frozen=True)
class SystemFacts:
    """The machine without its GPUs."""

    python: str
    system: str = "Linux"
    machine: str = "x86_64"
    cpus: int = 1  # that this process may use
    cpu_source: str = "affinity"  # of that number
    cpu_problem: str = ""  # what of it could not be read
    others_load: float | None = None  # CPUs that other processes keep busy; None: not known
    memory_bytes: int = 0
    shared_memory_bytes: int | None = None  # free in /dev/shm; None without one
    has_libnuma: bool = False
    uv: str | None = None
    pyenv: str | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)  # of REQUIRED; None: not installed
    compiles_anew: bool = False  # each process compiles the libraries' modules, for itself
    sandbox: str = ""  # of the code reward: its level and protections, or why there is none
    unprotected: tuple[str, ...] = ()  # protections of the sandbox that the kernel does not grant


def measure_system() -> SystemFacts:
    """Return the facts of this machine."""
    shared, cpus, others = Path("/dev/shm"), usable_cpus(), OthersLoad()
    sandbox, unprotected = measure_sandbox()
    time.sleep(LOAD_SECONDS)
    return SystemFacts(
        python=platform.python_version(),
        system=platform.system(),
        machine=platform.machine(),
        cpus=cpus.count,
        cpu_source=cpus.source,
        cpu_problem=cpus.problem,
        others_load=others.cpus(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        shared_memory_bytes=shutil.disk_usage(shared).free if shared.is_dir() else None,
        has_libnuma=can_load("libnuma.so.1"),
        uv=first_line(capture([find_uv(), "--version"])),
        pyenv=first_line(capture(["pyenv", "--version"])),
        versions={name: installed_version(name) for name in REQUIRED},
        compiles_anew=compiles_anew(),
        sandbox=sandbox,
        unprotected=unprotected,
    )


def compiles_anew(library: str = "torch") -> bool:
    """Whether Python is told to keep no bytecode, and a library came without any."""
    found = importlib.util.find_spec(library)
    if found is None or found.origin is None:
        return False
    return sys.dont_write_bytecode and not Path(importlib.util.cache_from_source(found.origin)).is_file()


def measure_sandbox() -> tuple[str, tuple[str, ...]]:
    """Try the sandbox of the code reward; return its description and the protections that it lacks."""
    sandbox = Sandbox()
    try:
        return sandbox.describe(), tuple(sandbox.inactive)
    except SandboxError as error:
        return str(error), tuple(MEANING)


def find_uv() -> str:
    """Return the uv on PATH, or the one that `make setup` installed beside the environment."""
    own = Path(sys.prefix).parent / ".tools" / "uv" / "bin" / "uv"
    return shutil.which("uv") or str(own)


def can_load(library: str) -> bool:
    """Whether the dynamic linker finds a library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def first_line(text: str | None) -> str | None:
    """Return the first line of a command's output."""
    return text.strip().splitlines()[0] if text and text.strip() else None


def fits(found: str, wanted: str) -> bool:
    """Whether a version is among those wanted; a build's local part (+cu130) does not count, a pre-release never fits.

    Args:
        found: As installed.
        wanted: Comparisons of releases by ==, >=, <= and <, separated by commas. The package `packaging` does more, but
            is missing where nothing is installed yet.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)*)(\.post\d+)?(\+.*)?", found)
    if match is None:
        return False
    release = _numbers(match[1])
    for part in wanted.split(","):
        comparison, number = re.fullmatch(r"(==|>=|<=|<)(\d+(?:\.\d+)*)", part.strip()).groups()  # type: ignore[union-attr]
        if not _COMPARISONS[comparison](release, _numbers(number)):
            return False
    return True


def _numbers(release: str) -> tuple[int, ...]:
    """Return the numbers of a release, without zeros at its end: 2.11 is 2.11.0."""
    numbers = [int(part) for part in release.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
