"""A thread that enforces deadlines of calls; one per call would take longer than a short call."""

import logging
import math
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Watchdog:
    """Calls `expire` from a thread of its own when what runs between `arm` and `disarm` outlasts its deadline.

    Args:
        expire: Ends what is guarded, called at most once for each `arm`, and never after `disarm` has returned.

    Example:
        ``dog.arm(5.0)``, then the work, then ``if dog.disarm():`` it took too long, and `expire` was called.
    """

    def __init__(self, expire: Callable[[], None]) -> None:
        self._expire = expire
        self._changed = threading.Condition()
        self._deadline = math.inf  # of what is guarded now
        self._looks_at = math.inf  # when the thread looks next
        self._has_expired = False
        self._is_closed = False
        threading.Thread(target=self._watch, name="deadline", daemon=True).start()

    def arm(self, timeout_s: float) -> None:
        """Guard what follows."""
        with self._changed:
            self._deadline, self._has_expired = time.monotonic() + timeout_s, False
            if self._deadline < self._looks_at:  # or it looks early, and waits for the rest
                self._changed.notify()

    def disarm(self) -> bool:
        """Guard nothing any more; return whether the deadline had passed."""
        with self._changed:  # one that is just expiring is waited for
            self._deadline = math.inf
            return self._has_expired

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._is_closed:
                remaining = self._deadline - time.monotonic()
                if remaining <= 0:
                    self._deadline, self._has_expired = math.inf, True
                    try:
                        self._expire()
                    except Exception:  # the next call has a deadline, too
                        log.exception("what ends a call at its deadline failed")
                self._looks_at = self._deadline
                self._changed.wait(min(remaining, threading.TIMEOUT_MAX) if self._deadline < math.inf else None)
