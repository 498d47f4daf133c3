"""What everybody needs who writes files that must not be lost."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

# Hidden names with this in them are this package's alone: whatever has one was made or moved there by a write. A name
# comes and goes in one step with its directory, which a marker inside does not
OURS = ".lightning-megatron-rl-"


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int:
    """Bytes that can be written below `path`, which need not be there yet."""
    return shutil.disk_usage(_nearest(path)).free


def check_writable(path: Path) -> None:
    """Refuse a destination, which need not be there yet, below a directory that takes no files.

    Raises:
        OSError: Names both.

    Example:
        ``check_writable(Path("runs/hf"))``
    """
    there = _nearest(path)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise OSError(f"{path} cannot be written: {there}: {error.strerror}. Choose another directory.") from error


class LockedDirectory:
    """A new directory that is locked while its writer lives, in place of one that a dead process has left.

    Where a file system has no locks, what is there counts as left.

    Raises:
        OSError: It cannot be made, or a process that lives is writing it.

    Example:
        ``made = LockedDirectory(Path(f".hf{OURS}partial"))``; ``made.remove()``, or ``made.path.rename("hf")`` and
        ``made.unlock()``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            descriptor = _lock(path)
            shutil.rmtree(path)
            os.close(descriptor)
        path.mkdir()
        self._descriptor: int | None = _lock(path)

    def unlock(self) -> None:
        """Leave the directory as it is."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Leave nothing of it, unless it was unlocked: then it is somebody else's."""
        if self._descriptor is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self.unlock()


def _lock(directory: Path) -> int:
    """Open and lock a directory until the descriptor is closed."""
    descriptor = os.open(directory, os.O_RDONLY)
    taken = False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        taken = True
    except OSError:  # a file system without locks
        pass
    if taken or not directory.exists() or not os.path.samestat(os.fstat(descriptor), directory.stat()):
        os.close(descriptor)
        raise OSError(f"another process is writing {directory}: wait for it, or choose another directory")
    return descriptor


def _nearest(path: Path) -> Path:
    """What there is of a path."""
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())
