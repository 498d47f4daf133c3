"""Reads text files of the user, with path, line and remedy in errors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PACKED = {  # how a file begins
    b"\x1f\x8b": ("gzip-compressed", "gunzip"),
    b"BZh": ("bzip2-compressed", "bunzip2"),
    b"\xfd7zXZ": ("xz-compressed", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd-compressed", "unzstd"),
    b"PK\x03\x04": ("a zip archive", "unzip"),
}
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_UTF8_MARK = b"\xef\xbb\xbf"


def user_path(path: str | Path) -> Path:
    """Return a path with `~` expanded.

    Raises:
        ValueError: It is empty, or there is no such home directory.
    """
    if not str(path).strip() or "\0" in str(path):
        raise ValueError(f"{str(path)!r} is no path: name a file or directory")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}: write the whole path") from error


def text_file(path: str | Path) -> Path:
    """Return the path of a text file, with `~` expanded, after a look at how it begins.

    Raises:
        ValueError: It is missing, not a plain file, cannot be read, is compressed or UTF-16.
    """
    found = user_path(path)
    if found.is_dir():
        raise ValueError(f"{path} is a directory, not a file")
    if not found.exists():
        raise ValueError(f"{path}: no such file or directory (working directory: {Path.cwd()})")
    if not found.is_file():
        raise ValueError(f"{path} is no plain file: copy what it gives into one")
    try:
        with found.open("rb") as stream:
            head = stream.read(8)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    for begin, (what, command) in _PACKED.items():
        if head.startswith(begin):
            raise ValueError(f"{path} is {what}, not text: unpack it with {command}")
    if head.startswith(_UTF16):
        raise ValueError(f"{path} is UTF-16, not UTF-8: convert it with iconv -f utf-16 -t utf-8")
    return found


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1, and the text of each line of a UTF-8 file.

    Raises:
        ValueError: What `text_file` refuses; a line that is not UTF-8, with its number.
    """
    with text_file(path).open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            line = raw.removeprefix(_UTF8_MARK) if number == 1 else raw
            if b"\0" in line:
                raise ValueError(f"{path}, line {number}: it holds NUL bytes, so the file is no UTF-8 text")
            try:
                yield number, line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: byte 0x{line[error.start]:02x} at column {error.start + 1} is not UTF-8:"
                    " convert the file, for example with iconv -f latin1 -t utf-8"
                ) from error


def parse_json(text: str, where: str) -> Any:
    """Parse JSON text.

    Raises:
        ValueError: It is not valid JSON, nested too deep, or holds half of a character; with `where`.
    """
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():  # escapes of characters in two halves, of which one may be missing
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        shown = text.strip() if len(text.strip()) <= 80 else f"{text.strip()[:79]}…"
        raise ValueError(f"{where}: not valid JSON ({error.msg} at column {error.colno}): {shown!r}") from error
    except RecursionError as error:
        raise ValueError(f"{where}: the JSON is nested too deep to be read") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: the JSON holds half of a character (a lone surrogate such as \\ud800)") from error
    except ValueError as error:  # a number of too many digits
        raise ValueError(f"{where}: {error}") from error
    return value


def read_json(path: str | Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        ValueError: As `read_lines` and `parse_json`.
    """
    return parse_json("".join(line for _, line in read_lines(path)), str(path))
