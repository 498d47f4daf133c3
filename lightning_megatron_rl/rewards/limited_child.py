"""A child process that answers requests, each within a limit of CPU time and memory, and is replaced when it dies."""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from signal import SIGPROF
from typing import Any

from lightning_megatron_rl.utilities.ranges import COUNT, POSITIVE, check_ranges

START_SECONDS = 300.0  # importing sympy takes 2 s, from a cold network file system much longer
ANSWER_SECONDS = 60.0  # wall clock, for a child that is stopped or starved; the CPU limit comes first


class RequestError(Exception):
    """The child ended before it answered."""


class LimitedChild:
    """Asks a worker script, from any thread; the kernel ends the child that takes too long over a request.

    A thread that hangs in native code cannot be ended, and one inside `re` holds the interpreter's lock, so that
    nothing else in its process runs. CPU time, not wall time: a busy machine does not change the answers.

    Args:
        worker: Script that is run by its path, with CPU seconds, bytes of memory and a file descriptor for replies; it
            writes a line there when it is ready, and one line of JSON for each line of JSON on its standard input.
        cpu_seconds: Limit for one request.
        memory_bytes: Limit of the child's address space.

    Example:
        ``LimitedChild(Path("math_worker.py")).ask(["1/2", "0.5"])`` is True.
    """

    def __init__(self, worker: Path, cpu_seconds: float = 5.0, memory_bytes: int = 2**30) -> None:
        check_ranges({"cpu_seconds": POSITIVE, "memory_bytes": COUNT}, locals())
        self.worker = worker
        self.cpu_seconds = cpu_seconds
        self.memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._child: _Child | None = None
        atexit.register(self.close)

    def ask(self, request: Any) -> Any:
        """Return the child's answer.

        Raises:
            RequestError: It took too long over this request, or died; the next one has another child.
            RuntimeError: It does not start.
        """
        with self._lock:
            child = self._running()
            try:
                child.requests.write(json.dumps(request) + "\n")
                child.requests.flush()
                reply = child.read(ANSWER_SECONDS)
            except BaseException:  # the guard's interrupt: the reply on its way would be taken for the next request's
                self._child = None
                child.process.kill()
                child.stop()
                raise
            if reply:
                return json.loads(reply)
            self._child = None
            code = child.stop()
        if code == -SIGPROF:
            raise RequestError(f"took more than {self.cpu_seconds} s of CPU time")
        raise RequestError(f"ended with code {code}")

    def close(self) -> None:
        """End the child; the next request starts another one."""
        with self._lock:
            if self._child is not None:
                self._child.stop()
                self._child = None

    def _running(self) -> "_Child":
        """Return the child, started if there is none."""
        if self._child is not None:
            if self._child.process.poll() is None:
                return self._child
            self._child.stop()
        self._child = None
        child = _Child(self.worker, self.cpu_seconds, self.memory_bytes)
        if not child.read(START_SECONDS):
            raise RuntimeError(
                f"the child process {self.worker.stem} did not start and ended with code {child.stop()}: its message "
                f"is above, all that it imports must be importable by {sys.executable}"
            )
        self._child = child
        return child


class _Child:
    """One child process, its requests on its standard input, its replies on a pipe that nothing else writes to."""

    def __init__(self, worker: Path, cpu_seconds: float, memory_bytes: int) -> None:
        replies, replies_fd = os.pipe()
        # -P: the directory of the script, whose modules are not for import by their bare names, stays off the path
        command = [sys.executable, "-P", str(worker), str(cpu_seconds), str(memory_bytes), str(replies_fd)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, pass_fds=[replies_fd], text=True)
        os.close(replies_fd)
        assert self.process.stdin is not None
        self.requests = self.process.stdin
        self.replies = os.fdopen(replies)

    def read(self, seconds: float) -> str:
        """Return the next line, "" if the child died or took longer than `seconds`."""
        readable, _, _ = select.select([self.replies], [], [], seconds)
        return self.replies.readline() if readable else ""

    def stop(self) -> int:
        """End the process, by force if it does not end by itself; return its exit code."""
        self.requests.close()  # an idle child ends at the end of its input, a dying one has a code of its own
        try:
            self.process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.replies.close()
        return self.process.returncode
