"""A child process that answers calls over a socket pair, each with a deadline, and ends with its parent."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import IO, Any

from lightning_megatron_rl.rollout.vllm.watchdog import Watchdog
from lightning_megatron_rl.utilities.files import driver_files

LOG_LINES = 200  # of the child's output that are kept
TAIL_LINES = 30  # of them that go into an error
LINE_BYTES = 4096
READ_S = 10.0  # to read an answer that is there: whoever asked may have been away for longer than its deadline
OTHERS_GRACE_S = 2.0  # for the rest of a process group whose leader has ended
# as Python's multiprocessing and vLLM's workers on a CPU name it
_NAMED_MEMORY = re.compile(r"/dev/shm/(?:psm_\w+|\S+-cpushm_\d+)")
PACKAGE_ROOT = Path(__file__).resolve().parents[3]

# Variables of a launcher, by which vLLM would take itself for a rank of the trainer.
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "MASTER_", "ROLE_", "GROUP_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "LD_PRELOAD")


class EngineDiedError(RuntimeError):
    """The engine's process ended by itself or was killed from outside."""


class EngineTimeoutError(RuntimeError):
    """A call took longer than its deadline; the process was killed."""


class EngineCallError(RuntimeError):
    """The call raised inside the engine's process, which was killed because its state is unknown."""


def child_environment(parent: dict[str, str], changes: dict[str, str]) -> dict[str, str]:
    """Return the parent's environment without its launcher's variables, with `changes` applied last."""
    kept = {k: v for k, v in parent.items() if k not in LAUNCHER_NAMES and not k.startswith(LAUNCHER_PREFIXES)}
    search_path = [kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else []
    always = {
        "PYTHONPATH": os.pathsep.join([*search_path, str(PACKAGE_ROOT)]),  # last, so that it hides nothing
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves its Python stack in the log
    }
    return kept | always | changes


class WorkerProcess:
    """A Python module run as the leader of its own process group, with one call at a time.

    The module gets ``<connection fd> <parent pid> <die by signal: 0 or 1> <inherited fds…>`` as arguments and answers
    each message with ``("ok", value)`` or ``("error", text)``, to which it may add news of itself. Any failure of a
    call, an interrupt included, kills the whole group: an answer that is still under way can then never be taken for
    the answer to the next call.

    Args:
        module: What `python -m` runs.
        environment: The child's whole environment.
        inherited_fds: File descriptors that the child keeps under the same numbers.
        echo_output: Copy the child's output to this process's standard error.
        hear: Takes the news that come with answers.
    """

    def __init__(
        self,
        module: str,
        environment: dict[str, str],
        inherited_fds: tuple[int, ...] = (),
        *,
        echo_output: bool = False,
        hear: Callable[[Any], None] = lambda news: None,
    ) -> None:
        self._hear = hear
        self._connection, childs_end = Pipe()
        # The death signal is tied to the *thread* that starts the child, so only the main thread may ask for it.
        by_signal = threading.current_thread() is threading.main_thread()
        arguments = [childs_end.fileno(), os.getpid(), int(by_signal), *inherited_fds]
        self._named_memory: set[Path] = set()  # of processes that were killed and could not remove it
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, arguments)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(childs_end.fileno(), *inherited_fds),
            start_new_session=True,  # Ctrl-C goes to the trainer alone, whose close() then ends the child
        )
        childs_end.close()
        self.pid = self._process.pid
        self.launched_at = time.monotonic()  # seconds
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=_keep_output, args=(self._process.stdout, self._lines, echo_output), daemon=True
        )
        self._reader.start()
        self._watchdog = Watchdog(_killer(weakref.ref(self)))
        weakref.finalize(self, self._watchdog.close).atexit = False

    def send(self, phase: str, message: Any, timeout_s: float) -> None:
        """Send a message whose answer `receive` takes later."""
        self._guarded(phase, timeout_s, lambda: self._connection.send(message))

    def receive(self, phase: str, timeout_s: float) -> Any:
        """Return the value of the answer to the last message; one that is there has come before its deadline."""
        if not self.is_gone and self._connection.poll():
            timeout_s = max(timeout_s, READ_S)
        return self._unpack(phase, self._guarded(phase, timeout_s, self._connection.recv))

    def _unpack(self, phase: str, answer: tuple[Any, ...]) -> Any:
        kind, value, *news = answer
        for told in news:
            self._hear(told)
        if kind == "error":
            self.kill()
            raise EngineCallError(f"{phase} failed in the engine's process {self.pid}:\n{value}\n{self.tail()}")
        return value

    def request(self, phase: str, message: Any, timeout_s: float) -> Any:
        """Send a message and return the value of its answer.

        Raises:
            EngineDiedError: The process ended; says how, with the last lines of its output.
            EngineTimeoutError: There was no answer within `timeout_s`.
            EngineCallError: The call raised in the process; carries its traceback.
        """

        def operation() -> tuple[Any, ...]:
            self._connection.send(message)
            return self._connection.recv()

        return self._unpack(phase, self._guarded(phase, timeout_s, operation))

    def tail(self) -> str:
        """The last lines of the process's output, under a heading."""
        lines = list(self._lines)[-TAIL_LINES:]
        if not lines:
            return "(it wrote no output)"
        return "last lines of its output:\n" + "\n".join(f"  | {line}" for line in lines)

    @property
    def is_gone(self) -> bool:
        """Whether it was killed and collected, after which it takes no call."""
        return self._process.returncode is not None

    def close(self, grace_s: float = 5.0) -> None:
        """End the process by end of file, then its group by SIGTERM, then SIGKILL, with seconds of grace after each."""
        self._note_named_memory()
        self._connection.close()
        if not self.is_gone:
            self._has_exited(grace_s)
            self._signal_group(signal.SIGTERM)
            self._has_exited(grace_s)
            self._others_have_exited(OTHERS_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """Kill the whole process group at once and collect it; calling it twice is fine."""
        if not self.is_gone:
            self._signal_group(signal.SIGKILL)  # before the leader is collected: its id cannot belong to others yet
            self._process.wait()
        for path in self._named_memory:
            path.unlink(missing_ok=True)
        self._named_memory.clear()
        self._watchdog.close()
        self._reader.join(timeout=2)
        self._connection.close()

    def _guarded(self, phase: str, timeout_s: float, operation: Callable[[], Any]) -> Any:
        """Run a blocking operation on the connection; at the deadline the process is killed, which unblocks it."""
        expired = False
        try:
            try:
                self._watchdog.arm(timeout_s)
                return operation()
            finally:
                expired = self._watchdog.disarm()
        except (EOFError, OSError) as error:
            if expired:
                self.kill()
                raise EngineTimeoutError(
                    f"{phase} did not end within {timeout_s:.1f} seconds and the engine's process {self.pid} was "
                    f"killed; raise the deadline, or ask for fewer or shorter samples per call; {self.tail()}"
                ) from error
            self._has_exited(1.0)  # the connection closes a moment before the process is gone
            self.kill()
            raise EngineDiedError(
                f"the engine's process {self.pid} {describe_exit(self._process.returncode)} during {phase}; "
                f"{self.tail()}"
            ) from error
        except BaseException:
            self.kill()
            raise

    def _has_exited(self, timeout_s: float) -> bool:
        """Wait for the exit without collecting it, so that the process group's id stays taken."""
        deadline = time.monotonic() + timeout_s
        while os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _others_have_exited(self, timeout_s: float) -> None:
        """Wait for the rest of the process group: Python's resource tracker removes what its dead siblings shared."""
        deadline = time.monotonic() + timeout_s
        while set(self._group()) - {self.pid} and time.monotonic() < deadline:
            time.sleep(0.02)

    def _group(self) -> Iterator[int]:
        """Ids of the group's processes that still run."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # ended in between
                if os.getpgid(int(process.name)) == self.pid and (process / "cmdline").read_bytes():
                    yield int(process.name)

    def _signal_group(self, signal_number: int) -> None:
        if not self.is_gone:
            try:
                if signal_number == signal.SIGKILL:
                    self._note_named_memory()
            finally:
                os.killpg(self.pid, signal_number)

    def _note_named_memory(self) -> None:
        """Note the shared memory of tensor-parallel workers, which they leave in /dev/shm when killed."""
        for pid in () if self.is_gone else self._group():
            with suppress(OSError):  # ended in between
                self._named_memory |= named_memory(str(pid)) | driver_files(pid)


def _killer(process: "weakref.ref[WorkerProcess]") -> Callable[[], None]:
    """Return a function that kills a process at its deadline and holds no reference to it."""

    def kill() -> None:
        worker = process()
        if worker is not None:
            worker._signal_group(signal.SIGKILL)

    return kill


def named_memory(process: str) -> set[Path]:
    """Return the files of /dev/shm that a process has mapped, by its id or "self": those of vLLM's workers."""
    return {Path(name) for name in _NAMED_MEMORY.findall((Path("/proc") / process / "maps").read_text())}


def _keep_output(stream: IO[bytes], lines: deque[str], echo: bool) -> None:
    with stream:
        for raw in iter(lambda: stream.readline(LINE_BYTES), b""):
            line = raw.decode(errors="replace").rstrip()
            lines.append(line)
            if echo:
                print(line, file=sys.stderr)


def describe_exit(returncode: int) -> str:
    """Say in words how a process ended."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    name = signal.Signals(-returncode).name
    return f"was killed by {name}" + (" (by hand, or for lack of memory)" if name == "SIGKILL" else "")
