"""Runs an untrusted Python program in a child process that can be killed and has access to little."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_megatron_rl.utilities.ranges import COUNT, POSITIVE, check_ranges

LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
START_SECONDS = 30.0  # from the start of the launcher to that of the program, on a busy machine
_KEPT_ERRORS = 2**20  # bytes of the standard error that are read back
# runs main.py as `python main.py` would, with the two names that `site` gives to programs: many end by them
_START = (
    "__builtins__.exit = __builtins__.quit = __import__('sys').exit; __file__ = 'main.py'; "
    "exec(compile(open(__file__, 'rb').read(), __file__, 'exec'))"
)

Level = Literal["namespaces", "user", "limits"]
LEVELS: tuple[Level, ...] = ("namespaces", "user", "limits")
FILTERED = "uncounted_memory"  # the protection of the system-call filter, which is independent of the level
PROTECTIONS: dict[Level, tuple[str, ...]] = {
    "namespaces": ("cpu", "memory", "file_size", "processes", "environment", "files", "network"),
    "user": ("cpu", "memory", "file_size", "processes", "environment"),
    "limits": ("cpu", "memory", "file_size", "processes"),
}
MEANING = {
    "cpu": "limited CPU time",
    "memory": "limited memory of each process",
    "uncounted_memory": "no memory that the limits do not count: memfd, System V and POSIX IPC, keys, rings (seccomp)",
    "file_size": "limited size of files",
    "processes": "a limited number of processes, which all end with the program",
    "environment": "neither inherits nor can read the environment of other processes, nor signal them",
    "files": "sees no files but Python's and its own, which are gone afterwards",
    "network": "no network",
}


@dataclass(frozen=True)
class SandboxLimits:
    """What one program may use.

    Args:
        wall_seconds: From its start to its end by force. # seconds
        cpu_seconds: CPU time of each of its processes. # seconds
        memory_bytes: Address space of each of its processes; Python itself takes about 20 MB.
        file_bytes: Size of a file, the standard output among them.
        disk_bytes: All its files together, held in memory (at the level "namespaces" only).
        processes: Processes and threads at one time (1 at the other levels).

    Raises:
        ValueError: A limit is not positive.
    """

    wall_seconds: float = 10.0
    cpu_seconds: int = 5
    memory_bytes: int = 2**29
    file_bytes: int = 2**24
    disk_bytes: int = 2**26
    processes: int = 16

    def __post_init__(self) -> None:
        check_ranges({**dict.fromkeys(vars(self), COUNT), "wall_seconds": POSITIVE}, vars(self), "limits.")


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended."""

    code: int | None  # exit code, 128 + signal if one ended it; None if it was killed at the deadline
    stdout: str
    stderr: str
    seconds: float


class SandboxError(RuntimeError):
    """The kernel refused what a sandbox is made of."""


class Sandbox:
    """A place for untrusted programs, with the strongest protections that the kernel grants.

    Which these are is found out at first use, by trying: on most Linux machines all; in a container without the right
    to make user namespaces those of another user's process, or of resource limits alone.

    Args:
        limits: What one program may use.
        levels: Levels to try, the best first.
        python: Interpreter of the programs; this one if not given. Another must be below /usr.

    Raises:
        ValueError: An interpreter that is not there.

    Example:
        ``Sandbox().run("print(1 + 1)").stdout == "2\\n"``
    """

    def __init__(
        self,
        limits: SandboxLimits = SandboxLimits(),
        levels: tuple[Level, ...] = LEVELS,
        python: str | None = None,
    ) -> None:
        self.python = os.path.realpath(python or sys.executable)
        if python is not None and not (self.python.startswith("/usr/") and os.access(self.python, os.X_OK)):
            raise ValueError(
                f"python={python!r} of the sandbox: give an interpreter below /usr, such as /usr/bin/python3"
            )
        self.limits = limits
        self.levels = levels
        self.refusals: dict[str, str] = {}  # by level that was tried in vain: what the kernel said
        self._level: Level | None = None
        self._filter = True

    @property
    def level(self) -> Level:
        """The best level that works here.

        Raises:
            SandboxError: None does, with the kernel's words for each.
        """
        if self._level is None:
            self._level = self._find_level()
        return self._level

    def _find_level(self) -> Level:
        for level in self.levels:
            for with_filter in (True, False):
                try:
                    result = self._run("print('runs')", b"", {}, level, with_filter)
                except SandboxError as error:
                    refused = str(error)
                else:
                    if result.stdout == "runs\n":
                        self._filter = with_filter
                        return level
                    refused = f"Python ends with code {result.code}: {result.stderr[-300:]}"
                filter_refused = with_filter and "seccomp" in refused
                self.refusals[FILTERED if filter_refused else level] = refused
                if not filter_refused:
                    break
        raise SandboxError(f"no sandbox can be made here: {self.refusals}")

    @property
    def active(self) -> list[str]:
        """Names of the protections that programs run under here; `MEANING` explains them."""
        active = set(PROTECTIONS[self.level])  # the level also finds out about the filter
        if self._filter:
            active.add(FILTERED)
        return [name for name in MEANING if name in active]

    @property
    def inactive(self) -> list[str]:
        """Names of the protections that the kernel does not grant here."""
        return [name for name in MEANING if name not in self.active]

    def describe(self) -> str:
        """Say which protections are active, which are not, and why.

        Example:
            "sandbox level namespaces; active: cpu, memory, ...; not active: none"
        """
        text = f"sandbox level {self.level}; active: {', '.join(self.active)}"
        text += f"; not active: {', '.join(self.inactive) or 'none'}"
        return text + "".join(f"; {level} refused: {reason}" for level, reason in self.refusals.items())

    def run(self, code: str, stdin: str = "", files: Mapping[str, str] | None = None) -> SandboxResult:
        """Run `code` as a program and wait for its end, which the deadline makes sure of.

        Args:
            code: Python source; it may import the standard library.
            stdin: What it reads from its standard input.
            files: Names and contents of files in its directory, which is also its working directory.

        Raises:
            SandboxError: It could not be started.

        Example:
            ``Sandbox().run("print(input())", stdin="hello").stdout == "hello\\n"``
        """
        return self._run(code, stdin.encode(errors="surrogatepass"), files or {}, self.level, self._filter)

    def _run(self, code: str, stdin: bytes, files: Mapping[str, str], level: Level, with_filter: bool) -> SandboxResult:
        directory = Path(tempfile.mkdtemp(prefix="sandbox-"))
        try:
            return self._run_in(directory, stdin, {**files, "main.py": code}, level, with_filter)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _run_in(
        self, directory: Path, stdin: bytes, files: Mapping[str, str], level: Level, with_filter: bool
    ) -> SandboxResult:
        directory.chmod(0o711)  # another user passes through to what is inside, and cannot list it
        (directory / "root").mkdir()
        (directory / "new").mkdir()
        box = directory / "box"
        box.mkdir()
        for name, content in files.items():
            (box / name).write_bytes(content.encode(errors="surrogatepass"))
        if level == "user":
            box.chmod(0o777)
        (directory / "stdin").write_bytes(stdin)
        limits = self.limits
        system = [path for path in ("/usr", "/lib", "/lib64") if os.path.exists(path)]
        prefix = sys.base_prefix
        spec = {
            "level": level,
            "directory": str(directory),
            "command": [self.python, "-I", "-S", "-B", "-X", "utf8", "-c", _START],
            "read_only": [*system, *([] if prefix.startswith("/usr") else [prefix])],
            "cpu_seconds": limits.cpu_seconds,
            "memory_bytes": limits.memory_bytes,
            "file_bytes": limits.file_bytes,
            "disk_bytes": limits.disk_bytes,
            "processes": limits.processes,
            "filter": with_filter,
        }
        started = time.monotonic()
        status, status_fd = os.pipe()
        with (
            os.fdopen(status, "rb") as problems,
            (directory / "stdin").open("rb") as in_,
            (directory / "stdout").open("wb") as out,  # files, not pipes: their size is limited, and nothing blocks
            (directory / "stderr").open("wb") as err,
        ):
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-B", str(LAUNCHER), json.dumps(spec), str(status_fd)],
                    env={},
                    stdin=in_,
                    stdout=out,
                    stderr=err,
                    pass_fds=[status_fd],
                    start_new_session=True,
                )
            finally:
                os.close(status_fd)
            try:
                problem = _read_status(problems.fileno())
                code = _wait(process, limits.wall_seconds) if not problem else None
            finally:  # also when the guard's interrupt ends this thread
                _end(process)
        if problem:
            raise SandboxError(problem)
        stdout = _read_text(directory / "stdout", limits.file_bytes)  # all: no file gets larger
        stderr = _read_text(directory / "stderr", _KEPT_ERRORS)
        return SandboxResult(code, stdout, stderr, time.monotonic() - started)


def _read_status(descriptor: int) -> str:
    """Return what stopped the launcher, "" once the program runs."""
    readable, _, _ = select.select([descriptor], [], [], START_SECONDS)
    if not readable:
        return f"the launcher did not come to its program within {START_SECONDS:g} s"
    return os.read(descriptor, 4096).decode(errors="replace")


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    return 128 - code if code < 0 else code


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the launcher and the first process of its namespace, with which the kernel kills all others."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_text(path: Path, num_bytes: int) -> str:
    with path.open("rb") as file:
        return file.read(num_bytes).decode(errors="replace")
