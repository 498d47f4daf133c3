"""Calls of code that may hang, under one deadline; late ones are interrupted."""

import asyncio
import ctypes
import inspect
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

MOST_ROUNDS = 4  # of calls that are as long as they may be before others get threads beside them
_OF_ANOTHER_LOOP = ("bound to a different event loop", "attached to a different loop", "Event loop is closed")


class _Interrupted(SystemExit):
    """Raised inside a thread whose result is no longer wanted.

    An event loop goes on after any other exception that reaches it in a callback, such as that of its own deadline.
    """


_STUCK = threading.Lock()  # of all lists of late threads: an object with one of its own could not go to another process


class DeadlineError(Exception):
    """The call had not returned, or not even begun, when the deadline passed."""


class EventLoopError(RuntimeError):
    """What was awaited holds something of another call's event loop."""


def awaited(answer: Any, seconds: float) -> Any:
    """Return the answer, or what it awaits for at most so long, in an event loop of its own.

    Raises:
        EventLoopError: It uses something, such as a client with open connections, that an earlier call's loop made.
    """
    if not inspect.isawaitable(answer):
        return answer
    try:
        return asyncio.run(_wait(answer, seconds))
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, RuntimeError) and any(text in str(cause) for text in _OF_ANOTHER_LOOP):
                raise EventLoopError(
                    f"{cause}: each call has an event loop of its own, so make clients, sessions and locks inside the"
                    " call that awaits them, not once for all"
                ) from error
            cause = cause.__cause__ or cause.__context__
        raise


async def _wait(answer: Awaitable[Any], seconds: float) -> Any:
    return await asyncio.wait_for(answer, seconds)


class BoundedCalls:
    """Runs calls in threads with a time limit.

    A thread cannot be killed. One that is late gets an exception, which ends a loop in Python at once; one that is
    inside native code or waits for a socket gets it when that returns, and until then it is left alone. With
    `max_stuck` such threads no call is made any more, so a reward that hangs for ever does not fill the memory.

    Calls that wait for a thread do not wait for those that hang: one that takes longer than its share of the time (that
    of a round if all calls are made in rounds of `num_threads`, but no less than a quarter) goes on, and another thread
    takes its place. A single thread makes calls one after the other whatever they do.

    Args:
        num_threads: Calls that run at the same time, without those that take long.
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
        if (num_stuck := self._num_stuck()) >= self.max_stuck:
            message = f"not called: {num_stuck} earlier calls still hang"
            return [DeadlineError(message) for _ in calls]
        batch = _Batch(calls, seconds)
        self._start(batch, min(self.num_threads, len(calls)))
        end, rounds = time.monotonic() + seconds, -(-len(calls) // self.num_threads)
        patience = seconds / min(max(rounds, 1), MOST_ROUNDS)
        room = self.max_stuck - num_stuck  # for threads that may turn out to hang
        while not batch.finished.wait(min(max(end - time.monotonic(), 0.0), patience / 4)):
            if time.monotonic() >= end:
                break
            if self.num_threads > 1:
                replaced = batch.replace_slow(patience, room)
                self._start(batch, replaced)
                room -= replaced
        outcomes, busy = batch.close()
        self._interrupt(busy)
        return outcomes

    def _num_stuck(self) -> int:
        with _STUCK:
            self._stuck = [thread for thread in self._stuck if thread.is_alive()]
            return len(self._stuck)

    def _start(self, batch: "_Batch[Any]", count: int) -> None:
        for _ in range(count):
            threading.Thread(target=batch.work, name="reward", daemon=True).start()

    def _interrupt(self, threads: Sequence[threading.Thread]) -> None:
        for thread in threads:
            if thread.is_alive() and thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Interrupted))
                with _STUCK:
                    self._stuck.append(thread)


class DaemonPool:
    """Threads that make calls, in their order; unlike another pool's, the end of the process does not wait for them.

    Args:
        name: Of the threads.
        num_threads: So many at most.
    """

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._name = name
        self._num_threads = num_threads
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit[T](self, function: Callable[..., T], *args: Any) -> "Future[T]":
        """Return what will have the result of the call."""
        future: Future[T] = Future()
        self._calls.put((future, partial(function, *args)))
        if len(self._threads) < self._num_threads:
            self._threads.append(threading.Thread(target=self._work, name=self._name, daemon=True))
            self._threads[-1].start()
        return future

    def close(self) -> None:
        """Let the threads end after the calls that they make; the others are cancelled."""
        with suppress(Empty):
            while (waiting := self._calls.get_nowait()) is not None:
                waiting[0].cancel()
        for _ in self._threads:
            self._calls.put(None)

    def _work(self) -> None:
        while (task := self._calls.get()) is not None:
            _settle(*task)


def _settle[T](future: "Future[T]", call: Callable[[], T]) -> None:
    """Give a future the result of a call, or its exception."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def call_in_threads[T](calls: Sequence[Callable[[], T]], num_threads: int) -> list[T]:
    """Return the calls' results, so many at a time, or raise the first exception.

    The end of the process waits for the calls that run, so that each cleans up behind itself, but begins no other: a
    pool that has all of them at once makes them all first.

    Example:
        ``call_in_threads([lambda: 1, lambda: 2], num_threads=8) == [1, 2]``
    """
    futures: list[Future[T]] = []
    running: set[Future[T]] = set()
    with ThreadPoolExecutor(min(num_threads, max(len(calls), 1))) as pool:
        for call in calls:
            if len(running) == num_threads:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
            futures.append(pool.submit(call))
            running.add(futures[-1])
        return [future.result() for future in futures]


class _Batch[T]:
    """The calls of one `run`, and what has become of them."""

    def __init__(self, calls: Sequence[Callable[[], T]], seconds: float) -> None:
        self._calls = calls
        self._pending = deque(range(len(calls)))
        self._missing = len(calls)
        self._outcomes: list[T | BaseException] = [DeadlineError(f"not done within {seconds:g} s") for _ in calls]
        self._busy: dict[threading.Thread, tuple[int, float]] = {}  # threads inside a call: which one, since when
        self._replaced: set[threading.Thread] = set()  # by another one: they take no further call
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

    def replace_slow(self, patience: float, most: int) -> int:
        """Return for how many threads whose call takes longer others are to take what waits: at most so many."""
        with self._lock:
            now = time.monotonic()
            slow = [thread for thread, (_, since) in self._busy.items() if now - since > patience]
            slow = [thread for thread in slow if thread not in self._replaced][: min(most, len(self._pending))]
            self._replaced.update(slow)
            return len(slow)

    def close(self) -> tuple[list[T | BaseException], list[threading.Thread]]:
        """Return what there is, and the threads that are inside a call; whatever comes later is dropped."""
        with self._lock:
            self._pending.clear()
            return list(self._outcomes), list(self._busy)

    def _take(self) -> int | None:
        thread = threading.current_thread()
        with self._lock:
            self._busy.pop(thread, None)
            if not self._pending or thread in self._replaced:
                return None
            index = self._pending.popleft()
            self._busy[thread] = index, time.monotonic()
            return index

    def _give(self, index: int, outcome: T | BaseException) -> None:
        thread = threading.current_thread()
        with self._lock:
            self._outcomes[index] = outcome
            self._missing -= 1
            if not self._missing:
                self._busy.pop(thread, None)
                self.finished.set()
