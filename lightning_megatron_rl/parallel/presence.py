"""Whether the other hosts of a run are there: a connection of each rank to rank 0, which the kernels keep alive.

A process that ends closes its connection, which is noticed at once. A host that is dead or cut off stops answering the
kernel's probes. A process that is merely busy, or holds Python's lock for a minute, answers them.
"""

import atexit
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

log = logging.getLogger(__name__)

STOP_S = 2.0  # for the thread to end with its process
GRACE_S = 5.0  # for a rank's own error, which says more
_PROBES = 3
_HERE, _BYE, _GONE = b"here", b"bye", b"gone "
_MOST_BYTES = 4096  # of a word


@dataclass(frozen=True)
class Meeting:
    """Where rank 0 listens, as the other ranks are told."""

    address: str
    port: int
    token: str  # without which a connection is closed


class Presence:
    """Ends this process when another rank of the run is gone.

    Args:
        hosts: The host of each rank, by rank.
        rank: This one.
        lost_after_s: Seconds without an answer after which a host counts as lost.
        on_lost: Is told who is gone, in a thread of its own; None: this process ends.
    """

    def __init__(
        self, hosts: list[str], rank: int, lost_after_s: float, on_lost: Callable[[str], None] | None = None
    ) -> None:
        self._hosts = hosts
        self._on_lost = on_lost
        self._rank = rank
        self._lost_after_s = lost_after_s
        self._counts = True  # whether the end of another rank is this one's
        self._stopped = False
        self._peers: dict[int, _Peer] = {}
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def listen(self, address: str, port: int = 0, token: str | None = None) -> Meeting:
        """Serve the others, as rank 0; returns where they find this rank.

        Args:
            address: Of this host.
            port: 0: one that is free.
            token: That the others know; None: a new one.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=len(self._hosts))
        meeting = Meeting(address, self._listener.getsockname()[1], token or secrets.token_hex(16))
        self._start(lambda: self._serve(meeting.token))
        return meeting

    def connect(self, meeting: Meeting) -> None:
        """Join rank 0.

        Raises:
            RuntimeError: It does not answer.
        """
        try:
            connection = socket.create_connection((meeting.address, meeting.port), timeout=self._lost_after_s)
        except OSError as error:
            raise RuntimeError(
                f"rank {self._rank} on {socket.gethostname()} cannot reach rank 0 on {self._hosts[0]} at"
                f" {meeting.address}:{meeting.port} ({error}): let the nodes of a run connect to each other on all"
                " ports of this network."
            ) from error
        peer = _Peer(connection, self._lost_after_s)
        peer.rank = 0
        peer.say(f"{meeting.token} {self._rank}".encode())
        self._peers[0] = peer
        self._start(self._follow)

    @property
    def present(self) -> list[int]:
        """The other ranks that are connected; on rank 0 all of them."""
        with self._lock:
            return sorted(self._peers)

    def watch(self) -> None:
        """Let the end of another rank be this one's from now on."""
        self._counts = True
        self._tell(_HERE)

    def rest(self) -> None:
        """The run has ended: each rank may leave when it likes."""
        self._counts = False
        self._tell(_BYE)

    def stop(self) -> None:
        """End the thread without a word: the process is about to end, and Python's threads must not be in the way."""
        self._counts, self._stopped = False, True
        with self._lock, suppress(OSError):
            for peer in self._peers.values():
                peer.shut()
            if self._listener is not None:
                self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)

    def _tell(self, word: bytes) -> None:
        with self._lock:
            for peer in self._peers.values():
                peer.say(word)

    def _start(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, name="presence", daemon=True)
        self._thread.start()

    # ---- rank 0 ----------------------------------------------------------------------------------------------------

    def _serve(self, token: str) -> None:
        assert self._listener is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, None)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        try:
                            connection, _ = self._listener.accept()
                        except OSError:  # shut by `stop`, or too many files are open
                            if self._stopped:
                                return
                            continue
                        selector.register(connection, selectors.EVENT_READ, _Peer(connection, self._lost_after_s))
                    elif not self._hear(key.data, token):
                        selector.unregister(key.fileobj)
                        self._leave(key.data)

    def _hear(self, peer: "_Peer", token: str) -> bool:
        """Take what a connection says; False if it is at its end, or its first words are not a rank's."""
        lines = peer.read()
        if lines is None:
            return False
        for line in lines:
            if peer.rank is None:
                said, _, rank = line.partition(b" ")
                known = rank.isdigit() and 0 < int(rank) < len(self._hosts)
                if not known or not secrets.compare_digest(said, token.encode()):
                    return False
                with self._lock:
                    peer.rank = int(rank)
                    self._peers[peer.rank] = peer
            else:
                peer.said_bye = line == _BYE
        return True

    def _leave(self, peer: "_Peer") -> None:
        peer.close()
        if peer.rank is None:  # nobody of this run
            return
        with self._lock:
            self._peers.pop(peer.rank, None)
        if peer.said_bye or not self._counts:
            return
        message = self._describe(peer)
        self._tell(_GONE + message.encode())
        self._end(message)

    # ---- the others ------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        peer = self._peers[0]
        while (lines := peer.read()) is not None:
            for line in lines:
                if line.startswith(_GONE) and self._counts:
                    self._end(line.removeprefix(_GONE).decode(errors="replace"))
                peer.said_bye = line == _BYE
        peer.close()
        if self._counts and not peer.said_bye:
            self._end(self._describe(peer))

    # ---- both ------------------------------------------------------------------------------------------------------

    def _describe(self, peer: "_Peer") -> str:
        assert peer.rank is not None
        who = f"rank {peer.rank} on host {self._hosts[peer.rank]}"
        if peer.failure is None:
            return f"{who} has ended or was killed: its own log has the reason, if there was time to write one"
        return (
            f"{who} has not answered for {self._lost_after_s:.0f} s ({peer.failure}): the host is down, or the network"
            " between the hosts is cut"
        )

    def _end(self, message: str) -> None:
        if self._on_lost is not None:
            self._on_lost(message)
            return
        text = f"rank {self._rank} on host {socket.gethostname()} ends: {message}."
        log.error(text)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            time.sleep(0.1)
            if not self._counts:  # the run was over
                return
        os._exit(1)


class _Peer:
    """One connection, whose words are lines."""

    def __init__(self, connection: socket.socket, lost_after_s: float) -> None:
        step = max(1, int(lost_after_s / (_PROBES + 1)))
        for level, option, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, step),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, step),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(lost_after_s * 1000)),
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        ):
            connection.setsockopt(level, option, value)
        connection.settimeout(None)
        self._connection = connection
        self._heard = b""
        self.rank: int | None = None  # None: it has not said who it is
        self.said_bye = False
        self.failure: str | None = None  # of the connection

    def say(self, word: bytes) -> None:
        """Send a word; a lost connection is noticed by the reader."""
        with suppress(OSError):
            self._connection.sendall(word + b"\n")

    def read(self) -> list[bytes] | None:
        """Wait for words and return them; None at the connection's end."""
        try:
            received = self._connection.recv(_MOST_BYTES)
        except OSError as error:
            if not isinstance(error, ConnectionResetError):
                self.failure = error.strerror or str(error)
            received = b""
        if not received or len(self._heard) > _MOST_BYTES:
            return None
        *lines, self._heard = (self._heard + received).split(b"\n")
        return lines

    def shut(self) -> None:
        """Let the reader see the connection's end."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


_current: Presence | None = None


def install(presence: Presence) -> None:
    """Make it this process's."""
    global _current
    _current = presence
    atexit.register(presence.stop)


def watch() -> None:
    """Let the end of another host's rank be this one's; nothing on one host."""
    if _current is not None:
        _current.watch()


def rest() -> None:
    """Let the ranks leave as they like: the run has ended."""
    if _current is not None:
        _current.rest()
