"""What everybody needs who writes files that must not be lost."""

import os
import shutil
import tempfile
from pathlib import Path


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


def _nearest(path: Path) -> Path:
    """What there is of a path."""
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())
