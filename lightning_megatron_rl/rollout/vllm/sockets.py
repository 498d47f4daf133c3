"""A directory for the sockets of an engine's processes, removed with the engine or by a later run."""

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

PREFIX = "lightning-megatron-rl-sockets-"
SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"  # where vLLM's processes make theirs


class SocketDirectory:
    """A new directory that only this user can read; what dead runs have left beside it is removed first.

    A lock on it shows that its owner lives: the kernel gives it back however the owner ends.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        for left in parent.glob(PREFIX + "*"):
            with suppress(OSError):  # in use, another user's, or removed by another run at this moment
                _remove_unless_locked(left)
        self.path, self._lock = _make_locked(parent)
        self._finalizer = weakref.finalize(self, _close, self.path, self._lock, os.getpid())

    def close(self) -> None:
        """Remove it; calling it twice is fine."""
        self._finalizer()


def _make_locked(parent: Path) -> tuple[Path, int]:
    """Make a directory and lock it; another run may take it for a dead one's before it is locked."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        try:
            descriptor = _lock(path)
        except (FileNotFoundError, BlockingIOError):  # removed, or locked by who removes it
            continue
        if path.exists():
            return path, descriptor
        os.close(descriptor)


def _lock(directory: Path) -> int:
    """Lock a directory and return the file descriptor that holds the lock.

    Raises:
        OSError: Another process has it.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_unless_locked(directory: Path) -> None:
    if directory.stat().st_uid != os.getuid():
        return
    descriptor = _lock(directory)
    try:
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)


def _close(directory: Path, descriptor: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child, which ends with the same objects
        shutil.rmtree(directory, ignore_errors=True)
        os.close(descriptor)
