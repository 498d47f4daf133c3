"""scripts/bootstrap.py: its decisions one by one, and whole runs with real uv on a project of tiny packages."""

import ast
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts import bootstrap
from tests.tiny_packages import make_project, make_sdist, make_wheel

ROOT = Path(__file__).resolve().parents[1]
BASE_PYTHON = os.path.realpath(sys.executable)


def test_it_is_written_for_python_3_9():
    ast.parse((ROOT / "scripts" / "bootstrap.py").read_text(), feature_version=(3, 9))


@pytest.mark.parametrize(
    ("gpu", "state", "flavour"),
    [
        ("", {}, "cpu"),
        ("1", {}, "gpu"),
        ("0", {"flavour": "gpu"}, "cpu"),
        ("", {"flavour": "gpu"}, "gpu"),  # else `make test` would undo `GPU=1 make setup`
    ],
)
def test_flavour_is_chosen_once_and_remembered(gpu: str, state: dict[str, str], flavour: str):
    assert bootstrap.wanted_flavour(gpu, state) == flavour


def test_unknown_flavour_is_refused():
    with pytest.raises(bootstrap.SetupError, match="GPU=yes: write GPU=1"):
        bootstrap.wanted_flavour("yes", {})


def test_missing_library_is_named_with_the_command_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert bootstrap.missing_libraries(["libc.so.6", "libnowhere.so.7"]) == ["libnowhere.so.7"]
    monkeypatch.setattr(bootstrap, "missing_libraries", list)  # as on a machine that has none of them
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(bootstrap.SetupError, match=r"libnuma.so.1 is missing.*\(libnuma1 on Debian and Ubuntu\)"):
        bootstrap.check_machine("Linux", "x86_64", ["libnuma.so.1"])
    for manager, command in [
        ("dnf", "sudo dnf install -y numactl-libs"),
        ("apt-get", "sudo apt-get install -y libnuma1"),
    ]:
        (tmp_path / manager).touch(mode=0o755)
        with pytest.raises(bootstrap.SetupError, match=f"install it: {command}"):
            bootstrap.check_machine("Linux", "x86_64", ["libnuma.so.1"])


def test_other_machines_and_full_disks_are_refused():
    with pytest.raises(
        bootstrap.SetupError, match="this is Darwin on arm64; the pinned packages are for Linux on x86_64"
    ):
        bootstrap.check_machine("Darwin", "arm64", [])
    with pytest.raises(bootstrap.SetupError, match=r"/data has 6.0 GB free and the packages need about 6.5 GB"):
        bootstrap.check_disk(6_000_000_000, "cpu", Path("/data"))
    bootstrap.check_disk(7_000_000_000, "cpu", Path("/data"))


def test_versions_of_uv():
    assert bootstrap.parse_version("uv 0.13.8 (x86_64-unknown-linux-gnu)\n") == (0, 13, 8)
    assert bootstrap.parse_version("uvx 1.0.0") < bootstrap.MINIMUM_UV
    assert bootstrap.parse_version(None) < bootstrap.MINIMUM_UV


def test_variables_that_choose_indexes_are_kept_and_those_that_redirect_are_not():
    kept = {
        **{
            "PIP_INDEX_URL": "a",
            "PIP_EXTRA_INDEX_URL": "b",
            "PIP_CERT": "c",
            "UV_DEFAULT_INDEX": "d",
        },
        **{
            "UV_INDEX_INTERNAL_PASSWORD": "e",
            "UV_CACHE_DIR": "f",
            "HTTPS_PROXY": "g",
            "HOME": "h",
            "PYTHON_COLORS": "0",
        },
    }
    redirecting = {
        **{"UV_SYSTEM_PYTHON": "1", "UV_PROJECT_ENVIRONMENT": "x", "UV_TORCH_BACKEND": "cpu", "UV_CONSTRAINT": "x"},
        **{"PIP_TARGET": "x", "PIP_USER": "1", "VIRTUAL_ENV": "x", "CONDA_PREFIX": "x", "PYTHONPATH": "x"},
    }
    assert bootstrap.clean_environment({**kept, **redirecting}) == kept


def test_uv_uses_the_index_of_pip_unless_it_has_one_of_its_own():
    listing = "global.index-url='https://a/simple'\n:env:.index-url='https://b/simple'\nglobal.cert='/ca.pem'\n"
    pip = bootstrap.pip_settings(listing)
    assert pip == {"index-url": "https://b/simple", "cert": "/ca.pem"}  # PIP_INDEX_URL beats pip.conf
    assert bootstrap.uv_environment({}, pip, has_uv_config=False) == {
        "UV_DEFAULT_INDEX": "https://b/simple",
        "SSL_CERT_FILE": "/ca.pem",
    }
    assert "UV_DEFAULT_INDEX" not in bootstrap.uv_environment({}, pip, has_uv_config=True)
    own = {"UV_INDEX_URL": "https://c/simple", "SSL_CERT_FILE": "/own.pem"}
    assert bootstrap.uv_environment(own, pip, has_uv_config=False) == own
    assert bootstrap.pip_settings(None) == {}


def test_python_candidates_are_believed_only_after_they_ran(tmp_path: Path):
    broken, other, incomplete, good = (tmp_path / name for name in ("broken", "other", "incomplete", "good"))
    scripts = {
        broken: "exit 127",  # a pyenv shim of a version that is not active
        other: "echo '3|11|True|/usr/bin/python3'",
        incomplete: f"exec {BASE_PYTHON} -c 'import no_such_module'",
        good: f'exec {BASE_PYTHON} "$@"',
    }
    for file, body in scripts.items():
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)
    found = bootstrap.find_python(iter(map(str, scripts)))
    assert found is not None
    assert os.path.samefile(found, BASE_PYTHON)
    assert bootstrap.find_python(iter([str(broken), str(other), str(incomplete), "/nowhere/python3.12"])) is None


def test_python_is_looked_for_in_every_folder_of_path_and_in_pyenv(tmp_path: Path):
    for file in ("a/python3.12", "b/python3.12", "b/python", "pyenv/versions/3.12.9/bin/python"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch(mode=0o755)
    path = os.pathsep.join(str(tmp_path / name) for name in ("a", "b", "nowhere"))
    found = bootstrap.python_candidates({"PATH": path, "PYENV_ROOT": str(tmp_path / "pyenv")})
    expected = ["a/python3.12", "b/python3.12", "b/python", "pyenv/versions/3.12.9/bin/python"]
    assert [os.path.relpath(file, tmp_path) for file in found] == expected


def test_python_without_pip_and_ensurepip_is_told_what_to_install(tmp_path: Path):
    with pytest.raises(
        bootstrap.SetupError, match=r"uv is missing, and /bin/false has no pip to fetch it; install pip: "
    ):
        bootstrap.find_pip(tmp_path, "/bin/false")


def test_python_without_pip_gets_a_private_one_and_uv_only_with_the_pinned_hash(tmp_path: Path):
    bare = tmp_path / "bare"
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", str(bare)], check=True)
    (tmp_path / ".tools").mkdir()
    pip = bootstrap.find_pip(tmp_path, str(bare / "bin" / "python"))
    assert pip[0] == str(tmp_path / ".tools" / "pip" / "bin" / "python")
    assert not (bare / "bin" / "pip").exists()

    index = tmp_path / "index"
    files = {"uv-0.13.8.data/scripts/uv": "#!python\nprint('uv 0.13.8')\n", "uv.py": ""}
    pinned = make_wheel(index, "uv", "0.13.8", files)
    (tmp_path / "requirements").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_INDEX_URL", index.as_uri())
        patch.setenv("PIP_USER", "1")  # these would send it elsewhere, or stop it
        patch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
        (tmp_path / "requirements" / "uv.txt").write_text(pinned[:-5] + "0000\n")
        with pytest.raises(bootstrap.SetupError, match="pip could not install uv"):
            bootstrap.install_uv(tmp_path, pip)
        assert not (tmp_path / ".tools" / "uv").exists()
        (tmp_path / "requirements" / "uv.txt").write_text(pinned)
        uv = bootstrap.install_uv(tmp_path, pip)
    assert uv == str(tmp_path / ".tools" / "uv" / "bin" / "uv")
    assert subprocess.check_output([uv, "--version"], text=True) == "uv 0.13.8\n"


@dataclass
class Project:
    """A small project with the real bootstrap script, an index of tiny packages, and a cache of its own."""

    root: Path
    environment: dict[str, str]

    def start(self, **variables: str) -> "subprocess.Popen[str]":
        command = [BASE_PYTHON, str(self.root / "scripts" / "bootstrap.py")]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env={**self.environment, **variables}, **streams)

    def setup(self, **variables: str) -> tuple[int, str]:
        process = self.start(**variables)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def pin(self, name: str, *lines: str) -> None:
        (self.root / "requirements" / f"{name}.txt").write_text("".join(lines))

    def installed(self) -> dict[str, str]:
        folders = self.root.glob(".venv/lib/python3.12/site-packages/*.dist-info")
        return dict(folder.name.removesuffix(".dist-info").split("-") for folder in folders)

    def wait_for_build(self) -> None:
        log, stop = Path(self.environment["TINY_BUILD_LOG"]), time.monotonic() + 30
        while not log.exists():
            assert time.monotonic() < stop, "the build did not start"
            time.sleep(0.02)

    def let_builds_end(self) -> None:
        Path(self.environment["TINY_BUILD_GO"]).touch()


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    uv = bootstrap.find_uv(ROOT)
    if uv is None:
        pytest.skip("needs uv, which `make setup` installs into .tools")
    root = tmp_path / "project"
    (root / "scripts").mkdir(parents=True)
    (root / "requirements").mkdir()
    shutil.copy(ROOT / "scripts" / "bootstrap.py", root / "scripts")
    make_project(root, "tiny_project")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").symlink_to(uv)
    (tmp_path / "bin" / "python3.12").symlink_to(BASE_PYTHON)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "HOME": str(tmp_path / "home"),
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_DEFAULT_INDEX": (tmp_path / "index").as_uri(),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TINY_BUILD_LOG": str(tmp_path / "builds.log"),
        "TINY_BUILD_GO": str(tmp_path / "go"),
    }
    result = Project(root, environment)
    result.pin("cpu", make_wheel(tmp_path / "index", "tiny_a", "1.0"))
    result.pin("build")
    yield result
    result.let_builds_end()


def test_second_run_installs_nothing_and_a_changed_pin_is_followed(project: Project, tmp_path: Path):
    code, output = project.setup()
    assert code == 0, output
    assert project.installed() == {"tiny_a": "1.0", "tiny_project": "0.1"}
    before = {file: file.stat().st_mtime_ns for file in project.root.rglob("*")}
    (tmp_path / "bin" / "uv").unlink()  # not even asked for its version
    assert project.setup() == (0, "")
    assert {file: file.stat().st_mtime_ns for file in project.root.rglob("*")} == before

    (tmp_path / "bin" / "uv").symlink_to(bootstrap.find_uv(ROOT) or "")
    project.pin("cpu", make_wheel(tmp_path / "index", "tiny_b", "2.0"))
    code, output = project.setup()
    assert code == 0, output
    assert project.installed() == {"tiny_b": "2.0", "tiny_project": "0.1"}
    assert (project.root / ".venv" / "pyvenv.cfg").stat().st_mtime_ns == before[project.root / ".venv" / "pyvenv.cfg"]


def test_wrong_hash_is_refused_and_not_taken_for_complete(project: Project):
    right = (project.root / "requirements" / "cpu.txt").read_text()
    project.pin("cpu", right.strip()[:-4] + "0000\n")
    code, output = project.setup()
    assert code == 1
    assert "Hash mismatch" in output
    assert "setup: uv could not install the pinned packages (see above)" in output
    project.pin("cpu", right)
    assert project.setup()[0] == 0
    assert project.installed()["tiny_a"] == "1.0"


def test_environment_of_an_interrupted_run_is_made_afresh(project: Project):
    assert project.setup()[0] == 0
    bootstrap.write_state(project.root, {"flavour": "cpu"})  # what a killed run leaves, and half a package:
    (project.root / ".venv" / "lib" / "python3.12" / "site-packages" / "tiny_a.py").unlink()
    code, output = project.setup()
    assert code == 0, output
    python = project.root / ".venv" / "bin" / "python"
    assert subprocess.check_output([python, "-c", "import tiny_a; print(tiny_a.version)"], text=True) == "1.0\n"


def test_two_runs_at_once_install_once(project: Project, tmp_path: Path):
    project.pin("cpu", make_sdist(tmp_path / "index", "tiny_slow", "1.0"))
    first = project.start()
    project.wait_for_build()
    second = project.start()
    assert second.stdout is not None
    assert second.stdout.readline() == "setup: waiting for another setup in this folder\n"
    project.let_builds_end()
    assert first.communicate(timeout=60)[0].endswith(".venv is ready (cpu)\n")
    assert second.communicate(timeout=60) == ("", None)
    assert (first.returncode, second.returncode) == (0, 0)
    assert project.installed() == {"tiny_slow": "1.0", "tiny_project": "0.1"}


def test_run_after_a_killed_one_waits_for_its_installer(project: Project, tmp_path: Path):
    project.pin("cpu", make_sdist(tmp_path / "index", "tiny_slow", "1.0"))
    first = project.start()
    project.wait_for_build()
    first.kill()
    first.wait(10)
    second = project.start()
    assert second.stdout is not None
    assert second.stdout.readline() == "setup: waiting for another setup in this folder\n"
    project.let_builds_end()
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 0, output
    assert project.installed() == {"tiny_slow": "1.0", "tiny_project": "0.1"}
    assert first.stdout is not None
    first.stdout.close()


def test_foreign_environment_is_not_touched(project: Project):
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", str(project.root / ".venv")], check=True)
    mine = project.root / ".venv" / "mine"
    mine.touch()
    code, output = project.setup()
    assert (code, output) == (
        1,
        "setup: .venv was not made by `make setup`; move it away, or remove it with `make clean`\n",
    )
    assert mine.exists()


def test_gpu_stack_is_compiled_after_the_wheels_and_stays(project: Project, tmp_path: Path):
    project.pin("gpu", make_wheel(tmp_path / "index", "tiny_torch", "1.0"))
    project.pin("gpu-source", make_sdist(tmp_path / "index", "tiny_extension", "1.0"))
    project.let_builds_end()
    gpu = {"tiny_torch": "1.0", "tiny_extension": "1.0", "tiny_project": "0.1"}
    code, output = project.setup(GPU="1")
    assert code == 0, output
    assert project.installed() == gpu
    assert project.setup() == (0, "")
    assert project.installed() == gpu
    assert project.setup(GPU="0")[0] == 0
    assert project.installed() == {"tiny_a": "1.0", "tiny_project": "0.1"}


def test_extra_indexes_do_not_break_it(project: Project, tmp_path: Path):
    make_wheel(tmp_path / "extra", "tiny_a", "0.9")  # hides 1.0 from uv unless indexes are merged
    code, output = project.setup(UV_EXTRA_INDEX_URL=(tmp_path / "extra").as_uri())
    assert code == 0, output
    assert "once more" not in output
    bootstrap.write_state(project.root, {"flavour": "cpu"})
    make_wheel(tmp_path / "extra", "tiny_a", "1.0+cpu")  # preferred by uv, whatever the hash
    code, output = project.setup(UV_EXTRA_INDEX_URL=(tmp_path / "extra").as_uri())
    assert code == 0, output
    assert "trying once more without UV_EXTRA_INDEX_URL" in output
    assert project.installed()["tiny_a"] == "1.0"


def test_second_run_in_this_checkout_installs_nothing():
    state = bootstrap.read_state(ROOT)
    if not bootstrap.is_complete(ROOT, state.get("flavour", "cpu"), state):
        pytest.skip("this checkout's .venv was not made by `make setup`")
    environment = {"PATH": "/nowhere"}  # finds neither uv nor pip
    command = [BASE_PYTHON, str(ROOT / "scripts" / "bootstrap.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
