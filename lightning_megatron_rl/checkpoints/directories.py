"""Directories that change atomically: unfinished checkpoints, publishing, replacing, linking and removing."""

import ctypes
import errno
import os
import shutil
from contextlib import closing, suppress
from pathlib import Path

from lightning_megatron_rl.checkpoints.manifest import MANIFEST_FILE, is_checkpoint
from lightning_megatron_rl.utilities.files import OURS, Lock, LockedDirectory, fsync

_INCOMPLETE, _REPLACED, _REMOVED, _LINK = (f"{OURS}{what}" for what in ("incomplete", "replaced", "removed", "link"))
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100  # linux/fcntl.h


class UnfinishedDirectory(LockedDirectory):
    """The hidden directory that a checkpoint is written to, until `publish` gives it its name.

    It is locked while its writer lives, which tells it from leftovers of a killed run.

    Args:
        path: The name it shall have.
        reserve: Keep the name with an empty directory if nothing has it, so that it is not given to another one.

    Raises:
        OSError: It cannot be made, or another process is writing under this name.
    """

    def __init__(self, path: Path, *, reserve: bool) -> None:
        self.target = path
        remove_unfinished(path.parent)
        super().__init__(_hidden(path, _INCOMPLETE))
        self._reserved = reserve and not os.path.lexists(path)
        if self._reserved:
            path.mkdir()

    def publish(self) -> None:
        """Give the directory its name, in place of whatever has it; its files are on the disk already."""
        for directory in [entry for entry in self.path.rglob("*") if entry.is_dir()] + [self.path]:
            fsync(directory)
        replace(self.path, self.target)
        fsync(self.target.parent)
        self.unlock()

    def abandon(self) -> None:
        """Remove it, and the reserved name."""
        if self._reserved:
            _remove_if_empty(self.target)  # first: the hidden name tells whose this one is
        super().abandon()


def remove_unfinished(parent: Path) -> None:
    """Remove leftovers of killed runs in `parent`, but no complete checkpoint under its own name."""
    for entry in list(parent.glob(f".*{OURS}*")):
        with suppress(OSError):  # another user's, say
            if entry.suffix == _INCOMPLETE:
                with closing(Lock(entry)) as lock:  # until it is gone, so that no run begins in it
                    if lock.held:
                        _remove_if_empty(_visible(entry))
                        _delete(entry)
            elif entry.suffix == _REPLACED and not os.path.lexists(_visible(entry)):
                entry.rename(_visible(entry))  # killed between two renames
            elif entry.suffix in (_REPLACED, _REMOVED):
                _delete(entry)


def replace(new: Path, path: Path) -> None:
    """Rename the directory or link `new` to `path`; what was there is deleted afterwards."""
    try:
        new.rename(path)  # nothing, an empty directory, or a link for a link
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            raise
    old = _hidden(path, _REPLACED)
    _delete(old)
    if _exchange(new, path):
        with suppress(FileNotFoundError):  # `remove_unfinished` of another save found it between the two lines
            new.rename(old)
    else:  # a file system that cannot exchange names: for an instant nothing has this one
        path.rename(old)
        new.rename(path)
    _delete(old)


def switch_link(link: Path, target: Path) -> None:
    """Atomically point `link` to `target`, by a relative path."""
    new = _hidden(link, _LINK)
    _delete(new)  # a link, or the checkpoint that it was exchanged for, of a run that was killed
    new.symlink_to(os.path.relpath(target, link.parent))
    replace(new, link)
    fsync(link.parent)


def is_linked(path: Path) -> bool:
    """Whether a link beside `path` points to it."""
    links = (entry for entry in path.parent.glob("[!.]*") if entry.is_symlink())
    return any(link.resolve() == path.resolve() for link in links)


def share_files(source: Path, directory: Path) -> None:
    """Fill `directory` with the files of `source`, by hard links; copies where a file system has none."""
    for file in source.rglob("*"):
        if file.is_file():
            copy = directory / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, copy)
            except OSError:
                shutil.copyfile(file, copy)
                fsync(copy)


def remove(path: Path) -> None:
    """Delete a checkpoint directory, and nothing that is not one; a link, and not what it points to.

    Raises:
        ValueError: `path` is a directory without a manifest.
    """
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        if not is_checkpoint(path):
            raise ValueError(f"refusing to delete {path}: it has no {MANIFEST_FILE}, so it is not a checkpoint.")
        hidden = _hidden(path, _REMOVED)  # half deleted it shall not look like one
        _delete(hidden)
        path.rename(hidden)
        _delete(hidden)


def _hidden(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")


def _visible(hidden: Path) -> Path:
    return hidden.with_name(hidden.name.removeprefix(".").removesuffix(hidden.suffix))


def _delete(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _remove_if_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:  # it is not there, not a directory, or not empty
        return


def _exchange(left: Path, right: Path) -> bool:
    """Let two names change places in one step; False where the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(left), os.fsencode(right)
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(right))
