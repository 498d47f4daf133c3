"""`SpanLog`: what a process did when, for shares of a step and for timelines.

Times are those of `time.monotonic`, which all processes of a machine share.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

MAX_SPANS = 20_000  # that a log keeps
SAMPLING = "sampling"  # name of a sampler's spans in which it draws tokens
JOIN_S = 0.005  # pauses of a sampler between two tokens, such as those in which it is asked for them


@dataclass
class Span:
    """Something that took time."""

    name: str
    began: float
    ended: float
    busy: float  # seconds of work; less than the span has where short pauses are a part of it
    tokens: int = 0  # that were sampled in it


class SpanLog:
    """Keeps the newest spans of one row of work, in the order of their ends. Threads may share it.

    Args:
        join_s: Spans of one name with a pause of at most so many seconds between them become one.
        limit: Spans that are kept.
    """

    def __init__(self, join_s: float = 0.0, limit: int = MAX_SPANS) -> None:
        self.known_until: float | None = None  # what came later is not known here yet; None: everything is
        self._join_s = join_s
        self._spans: deque[Span] = deque(maxlen=limit)
        self._num_added = 0
        self._is_open = False  # whether the last span may still grow
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, such as one in another process, begins empty."""
        return SpanLog, (self._join_s, self._spans.maxlen)

    def add(self, span: Span) -> None:
        """Add a span, to the last one if it has the same name and follows at once."""
        with self._lock:
            if self._is_open:
                last = self._spans[-1]
                if last.name == span.name and span.began - last.ended <= self._join_s:
                    last.ended = span.ended
                    last.busy += span.busy
                    last.tokens += span.tokens
                    return
            self._spans.append(span)
            self._num_added += 1
            self._is_open = self._join_s > 0

    def extend(self, spans: Iterable[Span], known_until: float | None = None) -> None:
        """Add the spans of another process, which knows of its work until `known_until`."""
        for span in spans:
            self.add(span)
        self.known_until = known_until

    @contextmanager
    def during(self, name: str) -> Iterator[Span]:
        """Add what runs inside as a span, also if it fails; its tokens may be set inside."""
        began = time.monotonic()
        span = Span(name, began, began, 0.0)
        try:
            yield span
        finally:
            span.ended = time.monotonic()
            span.busy = span.ended - began
            self.add(span)

    def within(self, name: str, began: float, ended: float) -> tuple[float, float]:
        """Return the busy seconds and the tokens of spans of a name between two times.

        Of a span that is partly outside, the part inside has its share of both.
        """
        busy = tokens = 0.0
        with self._lock:
            for span in reversed(self._spans):
                if span.ended <= began:
                    break
                inside = min(span.ended, ended) - max(span.began, began)
                if span.name == name and inside > 0:
                    share = inside / (span.ended - span.began)
                    busy += share * span.busy
                    tokens += share * span.tokens
        return busy, tokens

    def since(self, index: int) -> tuple[list[Span], int]:
        """Return the spans from number `index` on, as far as they are kept, and the number of the next one.

        A span that was returned does not grow any more.
        """
        with self._lock:
            self._is_open = False
            newest = list(islice(reversed(self._spans), self._num_added - index))
            return newest[::-1], self._num_added


class Reader:
    """Reads a log, each span once.

    Args:
        log: Read from its first span that is still kept.
    """

    def __init__(self, log: SpanLog) -> None:
        self.num_lost = 0  # spans that the log had dropped before they were read
        self._log = log
        self._next = 0

    def read(self) -> list[Span]:
        """Return what has come since the last call."""
        spans, end = self._log.since(self._next)
        self.num_lost += end - self._next - len(spans)
        self._next = end
        return spans
