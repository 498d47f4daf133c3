"""A pytest plugin that holds every test to two rules: it ends in time, and it leaves nothing behind.

Left behind counts what is there after a test (its function-scoped fixtures torn down) and was not there before it:
environment variables, processes, non-daemon threads, torch's process group, the working directory, shared memory.
What a fixture of wider scope starts is there before the test, and may be restarted during it (the same command line up
to numbers); a fixture that starts processes later calls `keep_process`.
"""

import faulthandler
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

import psutil
import pytest

DEADLINE = 400.0  # seconds per test, unless it is marked with `deadline(seconds)`
LAST_RESORT = 60.0  # seconds after which a test that did not react to its deadline ends the run
GRACE = 3.0  # seconds for processes and threads that were told to end
# for shared memory: Python's resource tracker of a server that another test has killed removes its semaphores
MEMORY_GRACE = 12.0
# Python's, POSIX semaphores (but joblib's, which it makes when it is imported), torch's, NCCL's, vLLM's on a CPU
SHARED_MEMORY = re.compile(r"psm_|sem\.(?!loky-)|torch_|nccl-|.*-cpushm_|cuda\.shm\.")
CUDA_DRIVER = re.compile(r"cuda\.shm\.[0-9a-f]+\.([0-9a-f]+)\.")  # with its process's id; there while that lives
LIBRARY_VARIABLES = {  # set by pytest, by this plugin, or by libraries always to the same value
    "CUDA_MODULE_LOADING",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "NVTE_CUDA_INCLUDE_DIR",
    "PYTEST_CURRENT_TEST",
    "PYTEST_POLICING_RUN",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TRITON_CACHE_DIR",
}
KERNEL_THREAD = 0x00200000  # among the flags in /proc/PID/stat
MARKER = "PYTEST_POLICING_RUN"  # in the environment of everything this run starts: orphans are known by it

_kept: set[int] = set()
_marked: dict[tuple[int, int], bool] = {}  # by id and start: whether a process was started by this run
_known: dict[tuple[int, int], psutil.Process] = {}  # likewise
_kernel: set[str] = set()  # ids of the kernel's threads, most of what a machine runs; the end of the run looks again
_stderr = pytest.StashKey[TextIO]()


def keep_process(pid: int) -> None:
    """Let process `pid` and its children, started for a session fixture, outlive the test that needed it first.

    They must be gone at the end of the run.
    """
    _kept.add(pid)


@dataclass(frozen=True)
class Snapshot:
    """What is there at one moment that a test could leave behind."""

    environment: dict[str, str]
    processes: dict[psutil.Process, str]  # with their commands
    threads: frozenset[threading.Thread]
    shared_memory: frozenset[str]
    process_group: bool
    directory: str


def take_snapshot() -> Snapshot:
    """Look around in this process."""
    return Snapshot(
        environment=_environment(),
        processes={process: command for process in _processes() if (command := _command(process))},
        threads=frozenset(thread for thread in threading.enumerate() if not thread.daemon),
        shared_memory=frozenset(_named_memory()),
        process_group=_has_process_group(),
        directory=os.getcwd(),
    )


def clean_up(before: Snapshot, keep: set[int]) -> list[str]:
    """Undo what happened since `before`, as far as possible, and return a line for each thing that had been left."""
    found = []
    for process in _leaked_processes(before, keep):
        found.append(f"process {process.pid}: {_command(process)[:200]}")
        process.kill()
        process.wait(GRACE)
    for thread in threading.enumerate():
        if not thread.daemon and thread not in before.threads:
            thread.join(GRACE)
            if thread.is_alive():
                found.append(f"thread {thread.name}")
    if _has_process_group() and not before.process_group:
        found.append("torch.distributed's default process group")
        sys.modules["torch.distributed"].destroy_process_group()
    found += [f"shared memory /dev/shm/{name}" for name in leaked_memory(before.shared_memory)]
    if os.getcwd() != before.directory:
        found.append(f"working directory {os.getcwd()}")
        os.chdir(before.directory)
    environment = _environment()
    for name in sorted(environment.keys() | before.environment.keys()):
        old, new = before.environment.get(name), environment.get(name)
        if old == new:
            continue
        found.append(f"environment variable {name}: {old!r} became {new!r}")
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old
    return found


def _environment() -> dict[str, str]:
    """Variables that a test must leave as they were."""
    return {name: value for name, value in os.environ.items() if name not in LIBRARY_VARIABLES}


def _processes() -> set[psutil.Process]:
    """Children of any depth, and orphans among what this run started."""
    marker = f"{MARKER}={os.environ.get(MARKER)}".encode()
    parents, seen = {}, {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and entry.name not in _kernel and int(entry.name) != os.getpid():
            with suppress(OSError):  # ended, or another user's
                pid, fields = int(entry.name), _read(f"/proc/{entry.name}/stat").rpartition(b")")[2].split()
                if int(fields[6]) & KERNEL_THREAD:
                    _kernel.add(entry.name)
                    continue
                parents[pid], seen[pid] = int(fields[1]), (pid, int(fields[19]))  # when it started
                if seen[pid] not in _marked:  # once for each process, not for each test
                    environment = Path(f"/proc/{entry.name}/environ").read_bytes()
                    _marked[seen[pid]] = marker in environment.split(b"\0")
    found = set()
    for pid, process in seen.items():
        ancestor: int | None = pid
        while ancestor is not None and ancestor != os.getpid():
            ancestor = parents.get(ancestor)
        if ancestor is not None or _marked.get(process):
            with suppress(psutil.NoSuchProcess):
                found.add(_known.get(process) or _known.setdefault(process, psutil.Process(pid)))
    return found


def _read(path: str) -> bytes:
    """A short file of /proc; each test reads two for each process, and `Path.read_text` takes four times as long."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def _age(process: psutil.Process) -> tuple[float, int]:
    """Sorts older processes first; of those started within one tick of the clock, the one with the lower id."""
    try:
        return process.create_time(), process.pid
    except psutil.NoSuchProcess:
        return 0.0, process.pid


def _command(process: psutil.Process) -> str:
    """The command line of `process`; "" if it has ended, or if Python keeps it for the whole run.

    A program that is still being loaded has no command line yet, which takes a moment when it must be read from disk.
    """
    patience = time.monotonic() + GRACE
    try:
        while not (command := " ".join(process.cmdline())):
            if process.status() == psutil.STATUS_ZOMBIE or time.monotonic() > patience:
                return ""
            time.sleep(0.01)
    except psutil.NoSuchProcess:  # a zombie's command line cannot be read either
        return ""
    return "" if "multiprocessing.resource_tracker" in command else command


def _leaked_processes(before: Snapshot, keep: set[int]) -> list[psutil.Process]:
    """New processes that are not below one of `keep`, replace none of `before`, and do not end within `GRACE`."""
    now = _processes()
    ended = Counter(re.sub(r"\d+", "#", command) for process, command in before.processes.items() if process not in now)
    leaked = []
    for process in sorted(now - before.processes.keys(), key=_age):  # the eldest is what was started again
        try:
            family = {process.pid, *(parent.pid for parent in process.parents())}
        except psutil.NoSuchProcess:
            continue
        kind = re.sub(r"\d+", "#", _command(process))
        if not kind or family & keep:
            continue
        if ended[kind] > 0:
            ended[kind] -= 1  # the same worker, started again
            continue
        leaked.append(process)
    _, alive = psutil.wait_procs(leaked, timeout=GRACE if leaked else 0)
    return [process for process in alive if _command(process)]


def _named_memory() -> dict[str, int]:
    """Inodes in /dev/shm, by the names that Python and torch make."""
    inodes = {}
    for name in os.listdir("/dev/shm"):
        if SHARED_MEMORY.match(name) and not _belongs_to_living(name):
            with suppress(FileNotFoundError):  # gone since
                inodes[name] = os.stat(f"/dev/shm/{name}").st_ino
    return inodes


def shared_memory() -> frozenset[str]:
    """Names in /dev/shm of the kinds that Python and torch make, without those that other process trees have open.

    Compared by inode: who makes a semaphore has it mapped under a name that glibc removes again.
    """
    inodes = _named_memory()
    if not inodes:
        return frozenset()
    ours = {os.getpid(), *(process.pid for process in _processes())}
    others = set()
    for process in psutil.process_iter():
        if process.pid not in ours:
            with suppress(OSError):  # ended, or another user's
                maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                others |= {int(line.split()[4]) for line in maps if " /dev/shm/" in line}
    return frozenset(name for name, inode in inodes.items() if inode not in others)


def _belongs_to_living(name: str) -> bool:
    """Whether CUDA's driver keeps it for a process that still runs."""
    owner = CUDA_DRIVER.match(name)
    return owner is not None and psutil.pid_exists(int(owner.group(1), 16))


def leaked_memory(before: frozenset[str]) -> list[str]:
    """Names that are not in `before` and do not go within `MEMORY_GRACE`.

    Those of another run, such as the one beside this, may be there for an instant before anybody has them open.
    """
    patience = time.monotonic() + MEMORY_GRACE
    # who has it open is only looked at where there is something new: that reads the mappings of every process
    while (names := _named_memory().keys() - before and shared_memory() - before) and time.monotonic() < patience:
        time.sleep(0.05)
    return sorted(names)


def _has_process_group() -> bool:
    """Whether torch.distributed is initialised in this process; does not import it."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


@contextmanager
def deadline(seconds: float, name: str, stderr: TextIO) -> Iterator[None]:
    """Fail the code inside after `seconds`; if it does not react, end the run with every thread's stack on `stderr`.

    A thread sends the signal, since code under test may use the process's only alarm timer for itself.
    """

    def fail(signum: int, frame: FrameType | None) -> None:
        pytest.fail(f"{name} did not end within {seconds:g} s")

    main = threading.main_thread().ident
    assert main is not None
    previous = signal.signal(signal.SIGUSR2, fail)
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGUSR2))
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + LAST_RESORT, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR2, previous)


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr, which is not captured yet, and mark what this run starts."""
    config.addinivalue_line(
        "markers", f"deadline(seconds): fail the test after this many seconds (default {DEADLINE:g})"
    )
    config.stash[_stderr] = os.fdopen(os.dup(2), "w")
    os.environ[MARKER] = uuid.uuid4().hex


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Put each test, its set-up and tear-down under a deadline."""
    marker = item.get_closest_marker("deadline")
    with deadline(float(marker.args[0]) if marker else DEADLINE, item.nodeid, item.config.stash[_stderr]):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _run_leaves_nothing() -> Iterator[None]:
    """Check after the last test and all fixtures that nothing is left of the run."""
    before = take_snapshot()
    yield
    _kernel.clear()
    if left := clean_up(before, keep=set()):
        pytest.fail("the run left behind:\n  " + "\n  ".join(left))


@pytest.fixture(autouse=True)
def _test_leaves_nothing(_run_leaves_nothing: None) -> Iterator[None]:
    """Check after each test that it left nothing behind."""
    before = take_snapshot()
    yield
    if left := clean_up(before, _kept):
        pytest.fail("the test left behind:\n  " + "\n  ".join(left))
