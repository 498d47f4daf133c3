"""`RecordFile`: lines of JSON by step, in a file that belongs to one run."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lightning_megatron_rl.rollout.record import STEP
from lightning_megatron_rl.utilities.files import create, numbered

_CHUNK = 1 << 20  # bytes


class RecordFile:
    """A file of lines that each begin with their step and name their run, as `record_line` makes them.

    A run that is resumed continues its file. Lines of steps that it does again were written by an attempt that ended
    after the checkpoint: they move to ``<name>-superseded.jsonl``, so that each step is in the file once. Another run
    gets a file of its own: ``<name>-2.jsonl``, ``<name>-3.jsonl``, ...

    Args:
        path: The name of the first run's file.
        run_id: Of this run.
        max_bytes: Size that the file is not let grow beyond.
        resumes: Whether steps may be in the file that come again.
    """

    def __init__(self, path: Path, run_id: str, *, max_bytes: float, resumes: bool) -> None:
        self._first, self._run_id = path, run_id
        self._max_bytes, self._resumes = max_bytes, resumes
        self.path: Path | None = None  # known when the first line is written
        self._size = 0

    def append(self, lines: Sequence[str], step: int) -> int:
        """Write the lines of a step, as many as there is room for; return how many that are.

        Raises:
            OSError: They cannot be written, with the file's name: none of them is in it.
        """
        if self.path is None:
            self.path = self._open(step)
        encoded = [line.encode() for line in lines]
        room, number = self._max_bytes - self._size, 0
        while number < len(encoded) and room >= len(encoded[number]):
            room -= len(encoded[number])
            number += 1
        try:
            with self.path.open("ab") as file:
                file.write(b"".join(encoded[:number]))
        except OSError as error:  # of a full disk, which names no file
            with suppress(OSError):
                os.truncate(self.path, self._size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._size += sum(len(line) for line in encoded[:number])
        return number

    def _open(self, step: int) -> Path:
        self._first.parent.mkdir(parents=True, exist_ok=True)
        for path in numbered(self._first):
            if not create(path):
                if _owner(path) != self._run_id:
                    continue
                if self._resumes:
                    self._set_aside(path, step)
            self._size = path.stat().st_size
            return path
        raise AssertionError("there are more names than files")

    def _set_aside(self, path: Path, step: int) -> None:
        """Move the lines from `step` on, and what is left of a line that was not finished."""
        with path.open("r+b") as file:
            keep = 0
            for line in file:
                found = STEP.match(line)
                if found is None or not line.endswith(b"\n") or int(found[1]) >= step:
                    break
                keep += len(line)
            file.seek(keep)
            with path.with_name(f"{path.stem}-superseded{path.suffix}").open("ab") as other:
                while chunk := file.read(_CHUNK):
                    other.write(chunk)
                is_empty = other.tell() == 0
            if is_empty:
                Path(other.name).unlink()
            file.truncate(keep)


def _owner(path: Path) -> str | None:
    """The run that the first line names; None if there is no such line."""
    with path.open("rb") as file:
        try:
            return str(json.loads(file.readline())["run"])
        except (ValueError, KeyError, TypeError):
            return None
