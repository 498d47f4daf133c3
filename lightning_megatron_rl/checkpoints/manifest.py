"""The manifest of a checkpoint: what it is, and each of its files with size and checksum; written last."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_megatron_rl.utilities.files import check_local, inside
from lightning_megatron_rl.utilities.versions import installed_versions

FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"
CHECKSUM = "sha256"
_OWN_CHECKSUM = "manifest_sha256"
_NAMED = 5  # checkpoints that a message names


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint is missing or damaged."""

    what = ""  # of the message, without its remedy


@dataclass(frozen=True)
class FileRecord:
    """One file, as the manifest has it."""

    bytes: int
    sha256: str


class HashedFile:
    """A file to write once, front to back; `record` has its size and checksum when it is closed and on the disk."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)  # a buffer would be written again when a full disk has failed us
        self._hash = hashlib.new(CHECKSUM)
        self.record = FileRecord(0, self._hash.hexdigest())

    def write(self, data: Any) -> int:
        """Append bytes; many of them are hashed and written without Python's lock."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        done = 0
        while done < len(view):
            done += self._file.write(view[done:])
        return done

    def tell(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            os.fsync(self._file.fileno())
            self.record = FileRecord(self._file.tell(), self._hash.hexdigest())
        self._file.close()


def record_file(path: Path) -> FileRecord:
    """Return size and checksum of a file by reading it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, CHECKSUM)
        return FileRecord(file.tell(), digest.hexdigest())


def write_manifest(directory: Path, description: Mapping[str, Any], files: Mapping[str, FileRecord]) -> None:
    """Write the manifest, which makes `directory` a checkpoint.

    Args:
        directory: Where the files are.
        description: Layout, world size, step and more, as plain data.
        files: Every other file, by its path relative to `directory`.
    """
    content = {
        "format_version": FORMAT_VERSION,
        **description,
        "versions": _versions(),
        "files": {name: asdict(files[name]) for name in sorted(files)},
    }
    content[_OWN_CHECKSUM] = _content_checksum(content)
    with HashedFile(directory / MANIFEST_FILE) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def is_checkpoint(path: Path) -> bool:
    """Whether there is a checkpoint at `path`, complete or not."""
    return (path / MANIFEST_FILE).is_file()


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint at `path`.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: `path` is not a checkpoint, or one of a newer format, or a URL.
        DamagedCheckpointError: The manifest is not what was written.
    """
    check_local(path, "checkpoint")
    if not path.exists():
        raise FileNotFoundError(f"checkpoint {path} does not exist. {_list_checkpoints(path.parent)}")
    if not is_checkpoint(path):
        hint = _list_checkpoints(path) if path.is_dir() else ""
        if path.is_file() and is_checkpoint(path.parent):
            hint = f"It is a file of the checkpoint {path.parent}."
        raise ValueError(
            f"{path} is not a checkpoint of this strategy, or one that was never finished: it has no {MANIFEST_FILE}."
            " A checkpoint is the directory that ModelCheckpoint wrote; a Hugging Face model directory goes into the"
            f" module's `model` argument. {hint}".rstrip()
        )
    try:
        content = json.loads((path / MANIFEST_FILE).read_bytes())
        format_version = content["format_version"]
        newer = format_version > FORMAT_VERSION
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, MANIFEST_FILE, f"cannot be read ({error})") from error
    if newer:
        raise ValueError(
            f"{path} has checkpoint format {format_version}, this version reads up to {FORMAT_VERSION}:"
            " upgrade lightning-megatron-rl."
        )
    if content.pop(_OWN_CHECKSUM, None) != _content_checksum(content):
        raise _damaged(path, MANIFEST_FILE, f"does not have the checksum it names ({_OWN_CHECKSUM})")
    return content


def check_files(path: Path, manifest: Mapping[str, Any], *, verify: bool, rank: int = 0, world_size: int = 1) -> None:
    """Check this rank's share of a checkpoint's files: that they are there, their sizes, and their checksums.

    Args:
        path: The checkpoint.
        manifest: What `read_manifest` returned.
        verify: Read the files and compare checksums; otherwise only sizes.
        rank: Which share; together the ranks check every file.
        world_size: Number of shares.

    Raises:
        DamagedCheckpointError: Names the first file that is not what was written.
    """
    files = sorted(manifest["files"].items(), key=lambda item: (-item[1]["bytes"], item[0]))
    if rank == 0:
        check_links(path)
    for name, record in files[rank::world_size]:
        try:
            file = inside(path, name)
        except ValueError as error:
            raise _damaged(path, MANIFEST_FILE, f"names a file outside the checkpoint: {error}") from error
        if not file.is_file():
            raise _damaged(path, name, "is missing")
        size = file.stat().st_size
        if size != record["bytes"]:
            raise _damaged(path, name, f"has {size} bytes where {record['bytes']} were written")
        if verify and (found := record_file(file).sha256) != record["sha256"]:
            raise _damaged(path, name, f"has the SHA-256 {found} where {record['sha256']} was written")


def check_links(path: Path) -> None:
    """Refuse a checkpoint in which a link leads out of it; the checkpoint itself may be reached through one.

    Raises:
        DamagedCheckpointError: Names the link.
    """
    for folder, folders, files in path.walk():  # which follows no links
        for entry in (folder / name for name in (*folders, *files)):
            if entry.is_symlink():
                try:
                    inside(path, str(entry.relative_to(path)))
                except ValueError as error:
                    raise _damaged(
                        path, str(entry.relative_to(path)), f"leads out of the checkpoint ({error})"
                    ) from error


def previous_checkpoints(path: Path) -> Iterator[Path]:
    """Yield the other checkpoints beside `path` that are not of a later step, from the latest to the first."""
    last_step = _step(path)
    others = [other for other in path.parent.glob("[!.]*") if not other.is_symlink() and is_checkpoint(other)]
    steps = {other: _step(other) for other in others if not (path.exists() and other.samefile(path))}
    found = [(step, other) for other, step in steps.items() if step is not None]
    for step, other in sorted(found, key=lambda item: (-item[0], item[1].name)):
        if last_step is None or step <= last_step:
            yield other


def _list_checkpoints(directory: Path) -> str:
    """Say which checkpoints are in a directory, the newest first."""
    found = [entry for entry in directory.glob("[!.]*") if is_checkpoint(entry)]
    found.sort(key=lambda entry: (entry / MANIFEST_FILE).stat().st_mtime, reverse=True)
    names = ", ".join(entry.name for entry in found[:_NAMED])
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"In {directory} there is {names}{more}." if found else f"There is no checkpoint in {directory}."


def _step(path: Path) -> int | None:
    """The global step of a checkpoint; None if its manifest cannot be read."""
    try:
        return int(read_manifest(path)["global_step"])
    except (OSError, ValueError, KeyError):
        return None


def _damaged(path: Path, name: str, what: str) -> DamagedCheckpointError:
    error = DamagedCheckpointError(
        f"checkpoint {path} is damaged: {path / name} {what}. Restore the file from a copy, resume from another"
        " checkpoint, or let MegatronStrategy(fall_back_to_previous=True) take the previous one in that directory."
    )
    error.what = f"checkpoint {path} is damaged: {path / name} {what}."
    return error


def _content_checksum(content: Mapping[str, Any]) -> str:
    return hashlib.new(CHECKSUM, json.dumps(content, sort_keys=True).encode()).hexdigest()


def _versions() -> dict[str, str]:
    packages = ("lightning-megatron-rl", "torch", "lightning", "megatron-core", "megatron-bridge")
    return installed_versions(packages)
