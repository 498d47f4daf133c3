"""Calls of code that may hang, under one deadline; late ones are interrupted."""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence


class _Interrupted(SystemExit):
    """Raised inside a thread whose result is no longer wanted.

    An event loop goes on after any other exception that reaches it in a callback, such as that of its own deadline.
    """


_STUCK = threading.Lock()  # of all lists of late threads: an object with one of its own could not go to another process


class DeadlineError(Exception):
    """The call had not returned, or not even begun, when the deadline passed."""


class BoundedCalls:
    """Runs calls in threads with a time limit.

    A thread cannot be killed. One that is late gets an exception, which ends a loop in Python at once; one that is
    inside native code or waits for a socket gets it when that returns, and until then it is left alone. With
    `max_stuck` such threads no call is made any more, so a reward that hangs for ever does not fill the memory.

    Args:
        num_threads: Calls that run at the same time.
        max_stuck: Late threads that may be alive.

    Example:
        ``BoundedCalls(2).run([lambda: 1, lambda: 1 // 0], seconds=5.0)`` is ``[1, ZeroDivisionError(...)]``.
    """

    def __init__(self, num_threads: int = 8, max_stuck: int = 64) -> None:
        self.num_threads = num_threads
        self.max_stuck = max_stuck
        self._stuck: list[threading.Thread] = []

    def run[T](self, calls: Sequence[Callable[[], T]], seconds: float) -> list[T | BaseException]:
        """Return each call's result, or the exception it raised, or `DeadlineError`; after `seconds` at the latest."""
        with _STUCK:
            self._stuck = [thread for thread in self._stuck if thread.is_alive()]
            num_stuck = len(self._stuck)
        if num_stuck >= self.max_stuck:
            message = f"not called: {num_stuck} earlier calls still hang"
            return [DeadlineError(message) for _ in calls]
        batch = _Batch(calls, seconds)
        threads = [
            threading.Thread(target=batch.work, name="reward", daemon=True)
            for _ in range(min(self.num_threads, len(calls)))
        ]
        for thread in threads:
            thread.start()
        batch.finished.wait(seconds)
        outcomes, busy = batch.close()
        for thread in threads:
            if thread.ident in busy and thread.is_alive():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Interrupted))
                with _STUCK:
                    self._stuck.append(thread)
        return outcomes


class _Batch[T]:
    """The calls of one `run`, and what has become of them."""

    def __init__(self, calls: Sequence[Callable[[], T]], seconds: float) -> None:
        self._calls = calls
        self._pending = deque(range(len(calls)))
        self._missing = len(calls)
        self._outcomes: list[T | BaseException] = [DeadlineError(f"not done within {seconds:g} s") for _ in calls]
        self._busy: set[int] = set()  # threads inside a call
        self._lock = threading.Lock()
        self.finished = threading.Event()
        if not calls:
            self.finished.set()

    def work(self) -> None:
        """Take calls until none is left."""
        try:
            while (index := self._take()) is not None:
                outcome: T | BaseException
                try:
                    outcome = self._calls[index]()
                except _Interrupted:
                    return
                except BaseException as error:  # SystemExit too: a reward that calls exit() has failed, not the run
                    outcome = error
                self._give(index, outcome)
        except _Interrupted:  # between the end of the call and here
            return

    def close(self) -> tuple[list[T | BaseException], set[int]]:
        """Return what there is, and the threads that are inside a call; whatever comes later is dropped."""
        with self._lock:
            self._pending.clear()
            return list(self._outcomes), set(self._busy)

    def _take(self) -> int | None:
        with self._lock:
            self._busy.discard(threading.get_ident())
            if not self._pending:
                return None
            self._busy.add(threading.get_ident())
            return self._pending.popleft()

    def _give(self, index: int, outcome: T | BaseException) -> None:
        with self._lock:
            self._outcomes[index] = outcome
            self._missing -= 1
            if not self._missing:
                self._busy.discard(threading.get_ident())
                self.finished.set()
