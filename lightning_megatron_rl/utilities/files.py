"""Helpers for files that must not be lost: locks, atomic names, checks of paths."""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path

# Hidden names with this in them are this package's alone: whatever has one was made or moved there by a write. A name
# comes and goes in one step with its directory, which a marker inside does not
OURS = ".lightning-megatron-rl-"
# "s3://bucket/a", what pathlib and os.path.abspath make of it ("s3:/bucket/a", "/here/s3:/bucket/a"), fsspec's chains
_URL = re.compile(r"(?:^|/)([a-z][a-z0-9+.-]*)(?::/|::)", re.IGNORECASE)


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def numbered(path: Path) -> Iterator[Path]:
    """Yield `path`, and then its name with -2, -3, ... before the suffix, without end.

    Example:
        ``runs/samples.jsonl``, ``runs/samples-2.jsonl``, ``runs/samples-3.jsonl``, ...
    """
    yield path
    yield from (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(2))


def create(path: Path) -> bool:
    """Make an empty file; False if something has the name. Of two processes one is told True."""
    try:
        path.open("x").close()
    except FileExistsError:
        return False
    return True


def write_whole(path: Path, text: str, errors: str = "strict") -> None:
    """Write a file of text in one step; of one that cannot be written nothing is left, and what was there stays.

    Args:
        path: The file.
        text: Its content, in UTF-8.
        errors: What becomes of characters that UTF-8 has not, as for `open`.
    """
    partly = path.with_name(f".{path.name}{OURS}partial")
    try:
        partly.write_text(text, encoding="utf-8", errors=errors)
        os.replace(partly, path)
    except OSError:
        partly.unlink(missing_ok=True)
        raise


def free_bytes(path: Path) -> int:
    """Bytes that can be written below `path`, which need not be there yet."""
    return shutil.disk_usage(_nearest(path)).free


def is_url(path: str | Path) -> bool:
    """Whether a path is a URL, or what became of one that was taken for a path.

    Example:
        ``is_url("s3://bucket/run")``; not ``is_url("runs/1")``
    """
    return _URL.search(str(path)) is not None


def check_local(path: str | Path, setting: str) -> None:
    """Refuse a URL where only a path of a local or shared file system works.

    Directories are locked, exchanged in one step and linked, which object stores and fsspec's file systems cannot do.
    Written as a path, a URL would become a local directory of that name.

    Args:
        path: What the user gave.
        setting: What chooses it, for the error.

    Raises:
        ValueError: Names both, and what to give in its place.
    """
    if match := _URL.search(str(path)):
        raise ValueError(
            f"{setting}={str(path)!r} is a URL ({match[1]}), and only paths of a local or shared file system work here:"
            " directories are locked, exchanged and linked in one step. Give a plain path such as /data/run (without"
            " file://), and copy to an object store when the run has ended, or mount the store."
        )


def inside(directory: Path, name: str) -> Path:
    """Return the path of what a file of `directory` names in it.

    Args:
        directory: What may be read.
        name: Relative to it.

    Raises:
        ValueError: The name is absolute, goes up, or is a link that leads out of the directory.
    """
    found = below(directory, name)
    if not found.resolve().is_relative_to(directory.resolve()):
        raise ValueError(f"{name!r} leaves {directory}: it is a link to {found.resolve()}")
    return found


def below(directory: Path, name: str) -> Path:
    """Return the path of a name in `directory`, which may be a link to anywhere, as in the cache of a model hub.

    Raises:
        ValueError: The name is absolute or goes up.
    """
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"{name!r} leaves {directory}: names are relative and without '..'")
    return directory / path


def check_writable(path: Path, setting: str | None = None) -> None:
    """Refuse a destination, which need not be there yet, below a directory that takes no files.

    Args:
        path: The destination; it is not made.
        setting: What chooses it, for the error.

    Raises:
        OSError: Names all three.
        ValueError: It is a URL.
    """
    check_local(path, setting or "destination")
    there = _nearest(path)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        named = str(path) if setting is None else f"{setting}={str(path)!r}"
        raise OSError(f"{named} cannot be written: {there}: {error.strerror}. Choose another directory.") from error


class Lock:
    """A lock on what is at `path`, until `close` or the end of this process.

    Attributes:
        held: Whether this process has it; None where the file system has no locks. It is False, too, if something else
            has come to `path` meanwhile.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        self.held: bool | None = True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.held = False
        except OSError:  # a file system without locks
            self.held = None
        try:
            if not os.path.samestat(os.fstat(self._descriptor), path.stat()):
                self.held = False
        except OSError:  # it is gone
            self.held = False

    def close(self) -> None:
        """Give it back; once."""
        os.close(self._descriptor)


class LockedDirectory:
    """A new directory that is locked while its writer lives, in place of one that a dead process has left.

    Where a file system has no locks, what is there counts as left.

    Raises:
        OSError: It cannot be made, or a process that lives is writing it.

    Example:
        ``made = LockedDirectory(Path(f".hf{OURS}partial"))``; ``made.abandon()``, or ``made.path.rename("hf")`` and
        ``made.unlock()``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with closing(self._take()):
                shutil.rmtree(path)
        path.mkdir()
        self._lock: Lock | None = self._take()

    def _take(self) -> Lock:
        with suppress(FileNotFoundError):  # another process took it for left
            lock = Lock(self.path)
            if lock.held is not False:
                return lock
            lock.close()
        raise OSError(f"another process is writing {self.path}: wait for it, or choose another directory")

    def unlock(self) -> None:
        """Leave the directory as it is."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def abandon(self) -> None:
        """Remove it, unless it was unlocked: then another process may have it."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self.unlock()


def _nearest(path: Path) -> Path:
    """What can be seen of a path."""
    return next(parent for parent in (path, *path.absolute().parents) if os.path.exists(parent))


def driver_files(pid: int) -> set[Path]:
    """Return what CUDA's driver has in shared memory for a process of this user that lends memory.

    The driver leaves it there when the process ends.
    """
    found = set()
    for path in Path("/dev/shm").glob(f"cuda.shm.*.{pid:x}.*"):
        with suppress(FileNotFoundError):
            if path.stat().st_uid == os.getuid():
                found.add(path)
    return found


def remove_files(paths: Iterable[Path]) -> None:
    """Remove files, whether they are still there or not."""
    for path in paths:
        path.unlink(missing_ok=True)
