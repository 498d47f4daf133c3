"""Splits a run's messages between the console and a log file."""

import inspect
import io
import logging
import os
import sys
import sysconfig
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

log = logging.getLogger(__name__)
PACKAGE = Path(__file__).parents[1]
_LIBRARIES = tuple({os.path.realpath(path) + os.sep for path in sysconfig.get_paths().values()})
# modules between the caller and the handler of a message
_MESSENGERS = ("logging", "warnings", "lightning_utilities.core.rank_zero", "lightning.fabric.utilities.rank_zero")
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_BUFFERED = 10_000  # records before the file is known
_SHOWN = ('(ckpt_path="last") is set, but there is no last checkpoint',)  # of libraries: a run that starts anew

_CLEAR = "\r\033[K"  # of the line that a terminal's cursor is in

_current: "MessageLog | None" = None


class MessageLog(logging.Handler):
    """Takes all log records and warnings of this process: some to the console, all to a file once there is one.

    The console shows what this package and the user's own code say, and errors. What libraries say is in the file: the
    banners, hints and deprecations of a dozen of them. An exception is that ``ckpt_path="last"`` found no checkpoint.

    Args:
        console: Where the shown ones go.
    """

    def __init__(self, console: TextIO) -> None:
        super().__init__(logging.DEBUG)
        self.console = console
        self.setFormatter(logging.Formatter(_FORMAT))
        self._plain = logging.Formatter("%(message)s")
        self._waiting: list[logging.LogRecord] = []
        self._file: _LogFile | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record where it belongs."""
        if is_shown(record.levelno, inspect.currentframe()):
            self._show(self._plain.format(record))
        self._keep(record)

    def warn(self, message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        """Take the place of `warnings.showwarning`."""
        is_ours = is_shown(logging.WARNING, inspect.currentframe()) and not issubclass(category, DeprecationWarning)
        if is_ours or any(words in str(message) for words in _SHOWN):
            self._show(f"{category.__name__}: {message}")
        text = f"{filename}:{lineno}: {category.__name__}: {message}"
        record = logging.LogRecord("py.warnings", logging.WARNING, filename, lineno, text, None, None)
        self._keep(record)

    def _show(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a terminal or pipe that is gone ends no run; the file has it all
            self.console.write(f"{line_start(self.console)}{text}\n")
            self.console.flush()

    def _keep(self, record: logging.LogRecord) -> None:
        if self._file is not None:
            self._file.handle(record)
        elif len(self._waiting) < _BUFFERED:
            self._waiting.append(record)

    def write_to(self, path: Path) -> None:
        """Write everything said so far, and from now on, to a file; lines are added to one that is there."""
        if self._file is not None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _LogFile(path, self._show)
        self._file.setFormatter(self.formatter)
        for record in self._waiting:
            self._file.handle(record)
        self._waiting.clear()

    def take_over(self) -> None:
        """Be the only handler: of the root logger, and of libraries' loggers that have had handlers of their own."""
        loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
        for logger in [logging.root, *loggers]:
            for handler in list(logger.handlers):
                if type(handler) is logging.StreamHandler and logger is not logging.root:
                    logger.removeHandler(handler)
                    logger.propagate = True
        if self not in logging.root.handlers:
            logging.root.addHandler(self)


class _LogFile(logging.FileHandler):
    """A file that says once when it takes no more; `logging` would print a traceback for each record."""

    def __init__(self, path: Path, show: Callable[[str], None]) -> None:
        super().__init__(path, delay=True, encoding="utf-8")
        self._show: Callable[[str], None] | None = show

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # it cannot be opened
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        error, show = sys.exc_info()[1], self._show
        if not isinstance(error, OSError):
            super().handleError(record)
        elif show is not None:
            self._show = None
            show(f"{self.baseFilename} takes no more ({error.strerror}): messages of libraries are lost from here on.")


def line_start(stream: TextIO) -> str:
    """Return what begins a whole line: on a terminal it takes the place of a progress line that is there."""
    return _CLEAR if stream.isatty() else ""


def printable(text: str, stream: TextIO) -> str:
    """Return text whose control characters do nothing to a terminal, and which a stream can encode.

    Line breaks and tabs stay, all others are escaped: a response may have sequences that clear the screen.
    """
    shown = "".join(
        ascii(char)[1:-1] if unicodedata.category(char) == "Cc" and char not in "\n\t" else char for char in text
    )
    encoding = stream.encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def is_shown(level: int, frame: FrameType | None) -> bool:
    """Whether the console shows a message, by its level and its first caller outside logging modules."""
    if level >= logging.ERROR:
        return True
    while frame is not None and _is_messenger(frame):
        frame = frame.f_back
    if frame is None:
        return False
    file = os.path.realpath(frame.f_code.co_filename)
    if file.startswith(f"{PACKAGE}{os.sep}"):
        return True
    return os.path.isfile(file) and not file.startswith(_LIBRARIES)


def _is_messenger(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name == __name__ or name.startswith(_MESSENGERS) or name.endswith("rank_zero")


class _ToLog(io.TextIOBase):
    """A stream whose lines are log records."""

    def __init__(self) -> None:
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in filter(str.strip, lines):
            log.info(line.rstrip())
        return len(text)


@contextmanager
def prints_to_log() -> Iterator[None]:
    """Make log records of what libraries print and of the bars that they draw on the standard output."""
    with redirect_stdout(_ToLog()):
        yield


class _LastingFile(io.FileIO):
    """A descriptor that takes whatever it is given."""

    _told = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not self._told:
                self._told = True
                log.warning("the standard output takes no more (%s): the run goes on without it.", error.strerror)
            return memoryview(data).nbytes


@contextmanager
def outlived_output() -> Iterator[None]:
    """Let a run go on where a terminal or pipe that is gone, or a full disk, takes no more of what it prints."""
    stream = sys.stdout
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):  # there is none, or it is text in memory
        yield
        return
    with suppress(OSError):
        stream.flush()
    buffer = io.BufferedWriter(_LastingFile(descriptor, "w", closefd=False))
    lasting = io.TextIOWrapper(
        # what the terminal's encoding lacks, of a sample say, is escaped: it must not end a run
        buffer,
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=bool(stream.line_buffering),
    )
    with redirect_stdout(lasting):
        try:
            yield
        finally:
            lasting.flush()


def begin() -> MessageLog:
    """Start handling this process's records and warnings, once."""
    global _current
    if _current is None:
        _current = MessageLog(sys.stderr)
        warnings.showwarning = _current.warn  # type: ignore[assignment]
        # bars of libraries, for data that is read before the first step
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        if not sys.stderr.isatty():  # downloads, and files of weights
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    _current.take_over()
    return _current


def current() -> MessageLog | None:
    """Return the log that `begin` has made; None outside the command line."""
    return _current
