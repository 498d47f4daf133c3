"""`CSVLogger` that keeps the metrics of an earlier run, and whose version can be set late."""

import csv
import os
from contextlib import suppress
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

METRICS_FILE = ExperimentWriter.NAME_METRICS_FILE


class AppendingWriter(ExperimentWriter):
    """Continues the metrics file of its directory; Lightning's writer deletes that file when it is made."""

    _size: int | None = None  # bytes of the file before the rows that are being added

    def _check_log_dir_exists(self) -> None:
        if not self._fs.isfile(self.metrics_file_path):
            return
        with self._fs.open(self.metrics_file_path, "r", newline="") as file:
            self.metrics_keys = next(csv.reader(file), [])
        with self._fs.open(self.metrics_file_path, "rb") as file:
            ends_line = file.read()[-1:] in (b"", b"\n")
        if not ends_line:  # a killed run has written half a row
            with self._fs.open(self.metrics_file_path, "ab") as file:
                file.write(b"\r\n")

    def save(self) -> None:
        """Write what waits, or nothing of it, and name the file in the error."""
        if "file" not in self._fs.protocol:
            super().save()
            return
        path = Path(self.metrics_file_path)
        self._size = path.stat().st_size if path.exists() else None
        try:
            super().save()
        except OSError as error:  # of a full disk, which names no file
            with suppress(OSError):
                if self._size is None:
                    path.unlink(missing_ok=True)
                else:
                    os.truncate(path, self._size)
            raise OSError(error.errno, error.strerror, str(path)) from error

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        """Add columns in a file beside this one, which then takes its place; Lightning empties the file and fills it.

        A disk that is full, or a kill, would leave what was written until then.
        """
        if "file" not in self._fs.protocol:
            super()._rewrite_with_new_header(fieldnames)
            return
        path = Path(self.metrics_file_path)
        partly = path.with_name(f".{path.name}.lightning-megatron-rl-partial")
        with path.open(newline="") as file:
            before = next(csv.reader(file), [])
        try:
            with path.open(newline="") as file, partly.open("w", newline="") as new:
                # values behind the last column, as of a row that was cut short and written on, have no name
                writer = csv.DictWriter(new, fieldnames=fieldnames, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(csv.DictReader(file))
                new.flush()
                os.fsync(new.fileno())
            os.replace(partly, path)
            self._size = path.stat().st_size
        except OSError:
            partly.unlink(missing_ok=True)
            self.metrics_keys = before  # the next try adds the columns
            raise


def expand_home(logger: CSVLogger) -> None:
    """Let `~` in a logger's `save_dir` be the home directory for all who ask for it.

    Its own writer takes it for that; whoever joins a name to `logger.log_dir` would have a directory called `~`.
    """
    logger._save_dir = os.path.expanduser(logger.save_dir)


def is_open(logger: CSVLogger) -> bool:
    """Whether this process writes through `logger` already; False on ranks that never do."""
    return logger._experiment is not None


def directory_of(logger: CSVLogger, version: int | str) -> str:
    """Return the directory that `logger` would write into with another version."""
    before, logger._version = logger._version, version
    try:
        return logger.log_dir
    finally:
        logger._version = before


def set_version(logger: CSVLogger, version: int | str) -> None:
    """Choose the directory of a logger that is not open yet."""
    logger._version = version


def open_for_appending(logger: CSVLogger) -> None:
    """Let `logger` write into its directory and delete nothing there."""
    logger._experiment = AppendingWriter(log_dir=logger.log_dir)
