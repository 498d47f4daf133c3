"""`CSVLogger` that keeps the metrics of an earlier run, and whose version can be set late."""

import csv

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

METRICS_FILE = ExperimentWriter.NAME_METRICS_FILE


class AppendingWriter(ExperimentWriter):
    """Continues the metrics file of its directory; Lightning's writer deletes that file when it is made."""

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
