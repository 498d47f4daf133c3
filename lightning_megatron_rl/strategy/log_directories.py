"""`LogDirectories`: one run per directory of a `CSVLogger`; nothing in it is deleted or overwritten."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_megatron_rl.compat.csv_logger import (
    METRICS_FILE,
    directory_of,
    expand_home,
    is_open,
    open_for_appending,
    set_version,
)
from lightning_megatron_rl.parallel.distributed import run_on_rank_zero
from lightning_megatron_rl.report.run import FACTS
from lightning_megatron_rl.utilities.files import OURS, Lock, check_writable, create, is_url

_OWNER = f"{OURS}run"  # in each directory: the run that it belongs to, locked while that run lives
_FIT = "fit"


class LogDirectories:
    """The directories of this process's CSV loggers.

    `CSVLogger` with a version of the user's own deletes the `metrics.csv` that it finds, whoever has written it. Here a
    run that is resumed continues it, and any other run gets a directory of its own:

    - `fit`: the logger's directory, or `fit-2`, `fit-3`, ... in it,
    - `validate`, `test` and `predict`: `validate`, `validate-2`, ... in it,
    - where versions are numbers: the next number, for all of them.
    """

    def __init__(self) -> None:
        self._locks: dict[Path, Lock] = {}  # by directory, on rank 0

    def take(self, loggers: Sequence[Logger], command: str, run_id: str, *, resumes: bool) -> None:
        """Choose the directory of each logger that has none yet, before Lightning opens it; a collective.

        Args:
            loggers: The Trainer's.
            command: "fit", "validate", "test" or "predict".
            run_id: Of this run.
            resumes: Whether it goes on from a checkpoint.

        Raises:
            RuntimeError: Another process is continuing this very run.
            ValueError: Two of the loggers have one directory.
        """
        for logger in loggers:
            if isinstance(logger, CSVLogger):
                expand_home(logger)
                version = run_on_rank_zero(partial(self._take, logger, command, run_id, resumes))
                set_version(logger, version)

    def release(self) -> None:
        """Let other processes continue the run."""
        for lock in self._locks.values():
            lock.close()
        self._locks = {}

    def _take(self, logger: CSVLogger, command: str, run_id: str, resumes: bool) -> int | str:
        wanted = logger.version
        if is_open(logger):
            return wanted
        for version in _versions(wanted, command):
            directory = directory_of(logger, version)
            if is_url(directory):  # no locks and no owners there
                file = f"{directory}/{METRICS_FILE}"
                taken = not get_filesystem(directory).isfile(file)
            else:
                taken = self._own(Path(directory), command, run_id, resumes)
            if taken:
                break
        set_version(logger, version)
        open_for_appending(logger)
        if version != wanted and command == _FIT:
            rank_zero_warn(
                f"{directory_of(logger, wanted)} has the log of another run: this run logs into {directory}. Resume"
                " that run (ckpt_path='last') to continue its log, or give this one a directory of its own for all that"
                " it writes (the logger's save_dir, name or version, and every dirpath)."
            )
        return version

    def _own(self, directory: Path, command: str, run_id: str, resumes: bool) -> bool:
        """Make `directory` this run's, if it may be."""
        if directory in self._locks:
            raise ValueError(
                f"two CSVLoggers of the Trainer write into {directory}: each would have its rows in the other's"
                " metrics.csv. Leave one out, or give it another save_dir, name or version."
            )
        check_writable(directory, "directory of the logger (its save_dir, name and version)")
        directory.mkdir(parents=True, exist_ok=True)
        mark, has_log = directory / _OWNER, (directory / METRICS_FILE).exists() or _has_steps(directory / FACTS)
        owner = None
        with suppress(FileNotFoundError):
            owner = mark.read_text()
        continues = command == _FIT and (owner == run_id or (owner is None and resumes))
        if has_log and not continues:
            return False
        create(mark)
        lock = Lock(mark)
        if lock.held is False:
            lock.close()
            if owner == run_id and continues:
                raise RuntimeError(
                    f"another process is writing the log {directory} of the run that this one goes on with: wait until"
                    " it has ended, or give this one a directory of its own (the logger's save_dir, name or version)."
                )
            return False
        mark.write_text(run_id)  # in place of a run that has logged nothing
        self._locks[directory] = lock
        return True


def _has_steps(facts: Path) -> bool:
    """Whether a run has done a step: its metrics may have waited for `log_every_n_steps` until it ended."""
    try:
        found = json.loads(facts.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and bool(found.get("step"))


def _versions(wanted: int | str, command: str) -> Iterator[int | str]:
    """The versions that a run may have, the best first."""
    if isinstance(wanted, int):
        yield from count(wanted)
        return
    if command == _FIT:
        yield wanted
    else:
        yield _below(wanted, command)
    yield from (_below(wanted, f"{command}-{number}") for number in count(2))


def _below(version: str, name: str) -> str:
    return f"{version}/{name}" if version else name
