"""One thread at a time in an engine: a stream of rollouts has a thread of its own beside the trainer's."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, Protocol


class HasLock(Protocol):
    """An engine with a lock, which a thread may take again that has it."""

    @property
    def call_lock(self) -> AbstractContextManager[Any]:
        """Who has it may change what is under way."""


def one_at_a_time[E: HasLock, **P, R](method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Let only one thread at a time into an engine's methods."""

    @functools.wraps(method)
    def locked(engine: E, *args: P.args, **kwargs: P.kwargs) -> R:
        with engine.call_lock:
            return method(engine, *args, **kwargs)

    return locked
