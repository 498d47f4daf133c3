"""Processes that are forked from one which has imported what they need.

`Nursery` is that one. It does nothing but fork and wait, so each `Worker` starts with those imports, and with nothing
that another has done.
"""

import contextlib
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from typing import IO, Any

from lightning_megatron_rl.utilities.files import driver_files, remove_files

_DUMP_S = 5.0  # for a stuck worker to begin to print its stacks


class Nursery:
    """Starts workers.

    Args:
        prepare: Called once, in the process that forks them: imports. Like `serve` it is found by its module and name.
        serve: What a worker does with its end of the pipe.
    """

    def __init__(self, prepare: Callable[[], None], serve: Callable[[Connection], None]) -> None:
        self._connection, child = Pipe()
        self._log = tempfile.TemporaryFile("ab+")  # noqa: SIM115  lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lightning_megatron_rl.verify.nursery", str(child.fileno())],
            pass_fds=[child.fileno()],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt is for who waits for its workers
        )
        child.close()
        self._connection.send((prepare, serve))

    def fork(self, environment: dict[str, str], files: Sequence[int]) -> int:
        """Return the process id of a new worker, which leads a session.

        Args:
            environment: All of its environment.
            files: Descriptors of its standard input, of its output, and of its pipe.

        Raises:
            RuntimeError: The process that forks is gone.
        """
        setting = {"environment": environment, "path": _path(), "directory": os.getcwd()}
        return int(self._ask(setting, files))

    def exit_code(self, pid: int, wait: bool) -> int | None:
        """Return the exit code of a worker, negative for a signal; None while it runs. Called no more once it has one.

        Args:
            pid: The worker.
            wait: Until it has ended.

        Raises:
            RuntimeError: The process that forks is gone.
        """
        code = self._ask((pid, wait))
        return None if code is None else int(code)

    def close(self) -> None:
        """End the process that forks; workers end with their pipes."""
        self._connection.close()
        self.process.kill()  # it sees no end while something that this process has forked has the other end, too
        self.process.wait()
        self._log.close()

    def _ask(self, question: Any, files: Sequence[int] = ()) -> Any:
        try:
            self._connection.send(question)
            for file in files:
                send_handle(self._connection, file, self.process.pid)
            return self._connection.recv()
        except (EOFError, OSError) as error:
            code = self.process.wait()
            raise RuntimeError(f"the process that forks workers exited with code {code}\n{_tail(self._log)}") from error


class Worker:
    """A process and the pipe to it; its output goes to a file.

    Args:
        nursery: Forks it.
        variables: Of its environment, beside those of this process.
    """

    def __init__(self, nursery: Nursery, variables: dict[str, str]) -> None:
        self._log = tempfile.TemporaryFile("ab+")  # noqa: SIM115  lives as long as the worker; appended by both sides
        self.connection, child = Pipe()
        stdin, self._stdin = os.pipe()
        self._nursery = nursery
        self._code: int | None = None
        try:
            self.pid = nursery.fork(_environment() | variables, [stdin, self._log.fileno(), child.fileno()])
        finally:
            os.close(stdin)
            child.close()

    def exit_code(self, wait: bool = False) -> int | None:
        """How the worker ended; None while it runs."""
        if self._code is None:
            self._code = self._nursery.exit_code(self.pid, wait)
        return self._code

    @property
    def num_threads(self) -> int:
        """Of the process; 0 if it is gone."""
        try:
            return len(os.listdir(f"/proc/{self.pid}/task"))
        except FileNotFoundError:
            return 0

    def kill(self) -> None:
        """End the worker and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(RuntimeError):  # who forked it is gone, too
            self.exit_code(wait=True)
        remove_files(driver_files(self.pid))
        os.close(self._stdin)
        self.connection.close()
        self._log.close()

    def stacks(self) -> str:
        """The worker's output with the stack of every thread, while it is stuck."""
        size = os.fstat(self._log.fileno()).st_size
        if self.exit_code() is None:
            os.write(self._stdin, b"\n")
            deadline = time.monotonic() + _DUMP_S
            while os.fstat(self._log.fileno()).st_size == size and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(0.5)  # the dump has begun: a loaded machine may need a moment for the rest
        return self.tail(8000)

    def tail(self, characters: int) -> str:
        """The end of what the worker has printed."""
        return _tail(self._log, characters)


def _environment() -> dict[str, str]:
    """What can be imported here can be imported there, a user's own modules among it."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NVIDIA_TF32_OVERRIDE": "0",  # fp32 means fp32: TransformerEngine would multiply it as TF32
        "PYTHONPATH": os.pathsep.join(_path()),
    }


def _path() -> list[str]:
    return [os.path.abspath(path) for path in sys.path]


def _tail(log: IO[bytes], characters: int = 4000) -> str:
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), characters, max(size - characters, 0)).decode(errors="replace")


# ---- in the process that forks, and in workers -----------------------------------------------------------------------


def _fork_workers(connection: Connection) -> None:
    """Fork workers and wait for them, until the connection closes."""
    prepare, serve = connection.recv()
    prepare()
    gc.freeze()  # pages that nobody writes to stay shared
    while True:
        try:
            question = connection.recv()
        except EOFError:
            return
        if isinstance(question, tuple):
            pid, waits = question
            found, status = os.waitpid(pid, 0 if waits else os.WNOHANG)
            connection.send(os.waitstatus_to_exitcode(status) if found else None)
            continue
        files = [recv_handle(connection) for _ in range(3)]
        pid = os.fork()
        if pid == 0:
            connection.close()
            _work(serve, question, *files)
        for file in files:
            os.close(file)
        connection.send(pid)


def _work(serve: Callable[[Connection], None], setting: dict[str, Any], stdin: int, log: int, pipe: int) -> None:
    """All that a worker does; it does not return."""
    code = 1
    try:
        os.setsid()  # its own group, so that its children can be ended with it
        for file, number in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(file, number)
        os.close(stdin)
        os.close(log)
        os.environ.clear()
        os.environ.update(setting["environment"])
        os.chdir(setting["directory"])
        sys.path[:] = setting["path"]
        threading.Thread(target=_watch_parent, daemon=True).start()
        serve(Connection(pipe))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _watch_parent() -> None:
    """Print every thread's stack for each line on stdin, and end with the process at its other end.

    Not by a signal: at the end of a run Lightning resets those that Python does not know to be handled.
    """
    while os.read(0, 1):
        faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


if __name__ == "__main__":
    _fork_workers(Connection(int(sys.argv[1])))
