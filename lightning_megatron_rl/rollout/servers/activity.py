"""`PoolActivity`: what servers did when, as the trainer sees it."""

import threading
import time
from collections.abc import Sequence

from lightning_megatron_rl.rollout.servers.client import ServerClient
from lightning_megatron_rl.utilities.spans import SAMPLING, Span, SpanLog


class PoolActivity:
    """Notes when a pool of servers samples: a server does while responses are under way on it.

    Args:
        servers: All of them. Where some have nothing under way, or are lost, the pool is busy by the others' share.
        log: Gets the spans.
    """

    def __init__(self, servers: Sequence[ServerClient], log: SpanLog) -> None:
        self._servers = servers
        self._log = log
        self._since = time.monotonic()
        self._share = 0.0  # of servers that have been busy since then
        self._lock = threading.Lock()

    def note(self, num_tokens: int = 0) -> None:
        """Add the time since the last call; call it when responses have begun or ended, and when tokens have come.

        Args:
            num_tokens: That have come.
        """
        with self._lock:
            began, now = self._since, time.monotonic()
            if self._share:
                self._log.add(Span(SAMPLING, began, now, (now - began) * self._share, num_tokens))
            self._since = now
            self._share = sum(server.load > 0 for server in self._servers) / len(self._servers)
