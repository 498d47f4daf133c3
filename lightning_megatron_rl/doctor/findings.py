"""From facts to findings: the lines of the report, each with its status and remedy."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from lightning_megatron_rl.devices import checks
from lightning_megatron_rl.devices.facts import DeviceFacts, version_text
from lightning_megatron_rl.doctor.packages import REQUIRED, TRANSFORMER_ENGINE, VLLM, SystemFacts, fits
from lightning_megatron_rl.planner.memory import GIB
from lightning_megatron_rl.utilities.cpus import busy_words

Level = Literal["ok", "note", "warning", "missing"]
SHARED_MEMORY_BYTES = GIB  # vLLM's processes and data loaders pass messages through it; containers start with 64 MiB


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    level: Level
    found: str
    remedy: str = ""


def wanted_device(wanted: str, facts: DeviceFacts | None) -> str:
    """Return "cuda" or "cpu": what this machine is to be judged for.

    "auto" is CUDA where there is a driver, a device, or vLLM's build for CUDA. Without torch there are no facts.
    """
    if wanted != "auto":
        return wanted
    if facts is None:
        return "cuda" if shutil.which("nvidia-smi") else "cpu"
    return "cuda" if facts.driver is not None or facts.gpus or "vllm" in facts.vllm_packages else "cpu"


def examine(system: SystemFacts, facts: DeviceFacts | None, device: str) -> list[Finding]:
    """Return all findings for runs on `device` ("cpu" or "cuda"); `facts` are None where torch cannot be imported."""
    findings = [*_platform(system), *_packages(system, device)]
    if facts is None:
        findings.append(Finding("devices, vLLM", "missing", "not looked at: torch cannot be imported", _setup(device)))
    else:
        findings += _cuda(facts) if device == "cuda" else [_without_cuda(facts)]
        findings.append(_sampler(facts, device))
    return [*findings, *_cpus(system), *_machine(system, device)]


def _platform(system: SystemFacts) -> list[Finding]:
    python_ok = system.python.startswith("3.12.")
    where = f"{system.system} on {system.machine}"
    return [
        Finding("python", "ok", system.python)
        if python_ok
        else Finding("python", "missing", system.python, "make setup takes or fetches a Python 3.12"),
        Finding("platform", "ok", f"{where}, {system.memory_bytes / GIB:.0f} GiB")
        if where == "Linux on x86_64"
        else Finding("platform", "missing", where, "the pinned packages are for Linux on x86_64"),
    ]


def _setup(device: str) -> str:
    return checks.GPU_SETUP if device == "cuda" else "make setup (docs/install.md)"


def _packages(system: SystemFacts, device: str) -> list[Finding]:
    findings = []
    for name, wanted in REQUIRED.items():
        found = system.versions.get(name)
        if name == "megatron-bridge":
            setup = f"{_setup(device)}, or pip install --no-deps megatron-bridge{wanted}"
        else:
            setup = _setup(device)
        if found is None:
            findings.append(Finding(name, "missing", f"not installed, wanted {wanted}", setup))
        elif not fits(found, wanted):
            findings.append(Finding(name, "missing", f"{found}, wanted {wanted}", setup))
        else:
            findings.append(Finding(name, "ok", found))
    return findings


def _without_cuda(facts: DeviceFacts) -> Finding:
    built = "a CPU build" if facts.torch_cuda is None else f"built for CUDA {version_text(facts.torch_cuda)}"
    return Finding(
        "CUDA",
        "note",
        f"no device; torch is {built}",
        "runs here on the CPU: training in fp32 and bf16 in every layout (gloo), torch's layers, vLLM for CPU,"
        " verify-layout, make demo, make test. Needs a GPU: Transformer Engine, fp8, tests/gpu",
    )


def _cuda(facts: DeviceFacts) -> list[Finding]:
    built = f"torch {facts.torch} for CUDA {version_text(facts.torch_cuda)}, driver {version_text(facts.driver)}"
    findings = [
        _checked("driver", built, lambda: checks.check_driver(facts)),
        _checked("devices", f"{len(facts.gpus)} visible", lambda: checks.check_cuda(facts)),
    ]
    if facts.processors is not None:
        findings.append(
            _checked("processors", f"{facts.processors} %", lambda: checks.check_processors(facts.processors))
        )
    for index, gpu in enumerate(facts.gpus):
        formats = ["bf16"] if gpu.capability >= checks.BF16_CAPABILITY else []
        formats += [f"fp8 {name}" for name, least in checks.FP8_CAPABILITIES.items() if gpu.capability >= least]
        text = (
            f"{gpu.name}, compute capability {version_text(gpu.capability)}, {gpu.free_bytes / GIB:.1f} of"
            f" {gpu.total_bytes / GIB:.1f} GiB free, {', '.join(formats) or 'no bf16, no fp8'}"
        )
        check = partial(checks.check_architecture, replace(facts, gpus=(gpu,)))
        finding = _checked(f"GPU {index}", text, check)
        if finding.level == "ok" and not formats:
            finding = Finding(finding.name, "warning", text, "use precision='16-mixed' or '32-true' on it")
        findings.append(finding)
    if len(facts.gpus) > 1:
        findings += _links(facts)
    engine = facts.transformer_engine
    version = None if engine is None else engine.version
    finding = _checked("Transformer Engine", f"{version}, imports", lambda: checks.check_transformer_engine(facts))
    if engine is None:  # torch's layers run without it
        finding = Finding(finding.name, "warning", "not installed", finding.remedy)
    elif finding.level == "ok" and not fits(engine.version, TRANSFORMER_ENGINE):
        finding = Finding(finding.name, "warning", f"{version}, wanted {TRANSFORMER_ENGINE}", checks.GPU_SETUP)
    return [*findings, finding]


def _links(facts: DeviceFacts) -> list[Finding]:
    pairs = ", ".join(f"{first}-{second} {link}" for (first, second), link in sorted(facts.links.items()))
    warnings = checks.peer_warnings(facts)
    if not warnings:
        return [Finding("links", "ok", pairs or "every GPU can read the others' memory")]
    return [Finding("links", "warning", pairs or "no listing by nvidia-smi", warning) for warning in warnings]


def _sampler(facts: DeviceFacts, device: str) -> Finding:
    from lightning_megatron_rl.rollout.vllm.installation import choose_device  # imports torch

    def check() -> None:
        choose_device(device, set(facts.vllm_packages), no_gpu=checks.missing_cuda(facts))
        checks.check_vllm(facts)

    version = "none" if facts.vllm is None else facts.vllm.version
    cuda = "" if facts.vllm is None or facts.vllm.cuda_major is None else f", built for CUDA {facts.vllm.cuda_major}"
    finding = _checked("vLLM", f"{version}{cuda}", check)
    if finding.level == "ok" and facts.vllm is not None and not fits(facts.vllm.version, VLLM):
        return Finding("vLLM", "missing", f"{version}, wanted {VLLM}", "make setup (docs/install.md)")
    return finding


def _cpus(system: SystemFacts) -> list[Finding]:
    text = f"{system.cpus} to use, by {system.cpu_source}"
    findings = [
        Finding("CPUs", "warning", text, system.cpu_problem) if system.cpu_problem else Finding("CPUs", "ok", text)
    ]
    busy = busy_words(system.others_load, system.cpus)
    if busy is not None:
        findings.append(
            Finding("load", "warning", busy, "wait for them, end them, or give them a lower priority (nice)")
        )
    elif system.others_load is not None:
        findings.append(Finding("load", "ok", f"other processes use {system.others_load:.1f} CPUs"))
    return findings


def _machine(system: SystemFacts, device: str) -> list[Finding]:
    findings = []
    if system.has_libnuma:
        findings.append(Finding("libnuma", "ok", "found"))
    else:
        level: Level = "missing" if device == "cpu" else "note"  # vLLM's kernels for the CPU are linked against it
        findings.append(Finding("libnuma", level, "not found", "apt-get install libnuma1 (dnf: numactl-libs)"))
    shared = system.shared_memory_bytes
    text = "no /dev/shm" if shared is None else f"{shared / GIB:.1f} GiB free"
    enough = shared is not None and shared >= SHARED_MEMORY_BYTES
    remedy = (
        "" if enough else f"give it {SHARED_MEMORY_BYTES // GIB} GiB or more: --shm-size=8g or --ipc=host in Docker"
    )
    findings.append(Finding("shared memory", "ok" if enough else "warning", text, remedy))
    if system.compiles_anew:
        told = "none on disk, and PYTHONDONTWRITEBYTECODE is set: imports take twice as long, in each process"
        findings.append(Finding("bytecode", "note", told, "unset it"))
    findings.append(
        Finding("sandbox", "ok", system.sandbox)
        if not system.unprotected
        else Finding("sandbox", "note", system.sandbox, "CodeTests(require=[...]) refuses to run without what you name")
    )
    findings.append(Finding("uv", "ok" if system.uv else "note", system.uv or "none: make setup installs its own"))
    findings.append(Finding("pyenv", "ok" if system.pyenv else "note", system.pyenv or "none: not needed"))
    return findings


def _checked(name: str, text: str, check: Callable[[], None]) -> Finding:
    try:
        check()
    except (RuntimeError, ValueError) as error:
        return Finding(name, "missing", text, str(error))
    return Finding(name, "ok", text)
