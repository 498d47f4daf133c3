"""Runs math-verify in a child process that can be killed: what a policy writes may take for ever to evaluate."""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from signal import SIGPROF

WORKER = Path(__file__).with_name("math_worker.py")
START_SECONDS = 300.0  # importing sympy takes 2 s, from a cold network file system much longer
ANSWER_SECONDS = 60.0  # wall clock, for a child that is stopped or starved; the CPU limit comes first


class MathVerifier:
    """Compares answers by math-verify, from any thread, each comparison with a limit of CPU time and memory.

    math-verify limits its time by SIGALRM, which only the main thread can use and which cannot interrupt native code
    (``\\binom{100000000}{50000000}`` hangs it). Here the kernel ends the child instead, and the next comparison starts
    another one (2 s). CPU time, not wall time: a busy machine does not change the answers.

    Args:
        cpu_seconds: limit for one comparison.
        memory_bytes: limit of the child's address space.

    Example:
        ``MathVerifier().equal("1/2", r"so it is $\\frac{2}{4}$")`` is True.
    """

    def __init__(self, cpu_seconds: float = 5.0, memory_bytes: int = 2**30) -> None:
        self.cpu_seconds = cpu_seconds
        self.memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._child: _Child | None = None
        atexit.register(self.close)

    def equal(self, reference: str, response: str) -> bool:
        """Whether the last expression in `response` equals `reference`; one over the limits is not, with a warning.

        Raises:
            RuntimeError: the child does not start.

        Example:
            ``verifier.equal("72", "23 + 49 = 72")`` is True.
        """
        with self._lock:
            child = self._running()
            child.requests.write(json.dumps([reference, response]) + "\n")
            child.requests.flush()
            reply = child.read(ANSWER_SECONDS)
            if reply:
                return json.loads(reply)
            self._child = None
            code = child.stop()
        reason = f"took more than {self.cpu_seconds} s of CPU time" if code == -SIGPROF else f"ended with code {code}"
        warnings.warn(
            f"comparing the answer {reference!r} with the response {response[:200]!r} {reason}: counted as wrong",
            RuntimeWarning,
            stacklevel=2,
        )
        return False

    def close(self) -> None:
        """End the child; the next comparison starts another one.

        Example:
            ``verifier.close()``
        """
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
        child = _Child(self.cpu_seconds, self.memory_bytes)
        if not child.read(START_SECONDS):
            raise RuntimeError(
                f"the child process for math-verify did not start and ended with code {child.stop()}, its message is "
                f"above: `{sys.executable} -c 'import math_verify'` must work"
            )
        self._child = child
        return child


class _Child:
    """One child process, its requests on its standard input, its replies on a pipe that nothing else writes to."""

    def __init__(self, cpu_seconds: float, memory_bytes: int) -> None:
        replies, replies_fd = os.pipe()
        # -P: the directory of the script, whose modules are not for import by their bare names, stays off the path
        command = [sys.executable, "-P", str(WORKER), str(cpu_seconds), str(memory_bytes), str(replies_fd)]
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
