"""What everybody needs who writes files that must not be lost."""

import os
import shutil
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
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(there).free
