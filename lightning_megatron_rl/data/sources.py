"""Sources: rows of a data set from a JSONL or Parquet file, a `datasets` name or directory, or a Python callable."""

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lightning_megatron_rl.utilities.ranges import COUNT, check_ranges
from lightning_megatron_rl.utilities.text_files import parse_json, read_lines, user_path

Row = dict[str, Any]

_OTHER_TABLE_SUFFIXES = {".json", ".csv", ".tsv", ".txt", ".arrow", ".feather", ".gz", ".zst", ".xlsx", ".npy", ".pt"}
_DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class RowSource(Protocol):
    """A function or an object that, called without arguments, returns all rows of a data set."""

    def __call__(self) -> list[dict[str, Any]]:
        """All rows."""
        ...


@dataclass
class DataSource:
    """A data set by its path, with what else is needed to name a part of it.

    Args:
        path: A `.jsonl` or `.parquet` file, a directory or hub name that `datasets.load_dataset` takes, or the dotted
            path of a Python callable that returns a list of rows. `~` is the home directory.
        split: Split of a directory or hub data set; a file or callable has none.
        name: Configuration of a directory or hub data set, like `main` of `openai/gsm8k`.
        limit: Take only the first so many rows.
    """

    path: str
    split: str = "train"
    name: str | None = None
    limit: int | None = None

    @property
    def location(self) -> Path:
        """The path with `~` expanded."""
        return user_path(self.path)

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path.strip():
            raise ValueError(
                f"a data set's path is {self.path!r}: name a .jsonl or .parquet file, a directory, a hub name or the"
                " dotted path of a callable, as text"
            )
        check_ranges({"limit": COUNT.called("null takes all rows")}, vars(self), f"{self.path!r}: ")


Source = RowSource | DataSource | str


def check_source(source: Source) -> None:
    """Refuse what is no source, before anything is read.

    Raises:
        ValueError: With what to give.
    """
    if isinstance(source, str):
        DataSource(source)
    elif isinstance(source, Path):
        raise ValueError(f"a data set is {source!r}: give its path as text, {str(source)!r}")
    elif not isinstance(source, DataSource) and (isinstance(source, type) or not callable(source)):
        raise ValueError(
            f"a data set is {_shorten(source)}, of the class {type(source).__name__}: give a path, a DataSource, or a"
            " function without arguments that returns a list of rows, such as `lambda: rows`"
        )


def load_rows(source: Source) -> list[Row]:
    """Read all rows of a source; a string stands for `DataSource(string)`.

    Raises:
        ValueError: if the source cannot be found or read, has no rows, or gives something other than a list of dicts.

    Example:
        ``load_rows("prompts.jsonl")`` with the line ``{"prompt": "1+1="}`` gives ``[{"prompt": "1+1="}]``.
    """
    if isinstance(source, str):
        source = DataSource(source)
    rows = _read(source) if isinstance(source, DataSource) else source()
    name = describe_source(source)
    if not isinstance(rows, list):
        raise ValueError(f"{name} returned {type(rows).__name__}, not a list of rows (dicts)")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} of {name} is {_shorten(row)}, not a dict of columns")
    if isinstance(source, DataSource) and source.limit is not None:
        rows = rows[: source.limit]
    if not rows:
        raise ValueError(f"{name} is an empty data set: 0 rows")
    return rows


def needs_download(source: Source) -> bool:
    """Whether one process per node should load the source before the others do."""
    if isinstance(source, str):
        source = DataSource(source)
    return isinstance(source, DataSource) and _reader(source) is _read_datasets


def describe_source(source: Source) -> str:
    """The source as error messages name it."""
    if isinstance(source, str):
        source = DataSource(source)
    if isinstance(source, DataSource):
        is_hub = _reader(source) is _read_datasets
        return f"{source.path!r} (split {source.split!r})" if is_hub else repr(source.path)
    return getattr(source, "__qualname__", type(source).__qualname__)


def column(row: Row, name: str, where: str) -> Any:
    """The value of a column.

    Raises:
        ValueError: if the row lacks it, with the columns that there are.
    """
    if name not in row:
        raise ValueError(
            f"{where} has no column {name!r}; its columns are {sorted(row)}: "
            f"name the right one in prompt_column, answer_column, completion_column or messages_column"
        )
    return row[name]


def _read(source: DataSource) -> list[Row]:
    reader = _reader(source)
    if reader in (_read_jsonl, _read_parquet, _call_dotted_path):
        _refuse_parts(source)
    return reader(source)


def _refuse_parts(source: DataSource) -> None:
    """Refuse a split or a configuration of what has none: the rows of a validation would be those of training."""
    asked = {"split": source.split, "name": source.name}
    ignored = {key: value for key, value in asked.items() if value not in (None, "train")}
    if ignored:
        named = ", ".join(f"{key}={value!r}" for key, value in ignored.items())
        raise ValueError(
            f"{source.path!r} with {named}: a file or a callable gives all its rows, it has no splits and no"
            f" configurations. Leave {' and '.join(ignored)} out, and give each set a file of its own"
        )


def _reader(source: DataSource) -> Callable[[DataSource], list[Row]]:
    """Which reader a path asks for: by suffix, then what exists, then the form of the name."""
    path, there = source.path, source.location
    if there.suffix in _FILE_READERS:
        return _FILE_READERS[there.suffix]
    if there.is_dir():
        return _read_datasets
    if there.suffix in _OTHER_TABLE_SUFFIXES or there.is_file():
        return _refuse_suffix
    if path.startswith(("/", "./", "../", "~")) or path.count("/") > 1:
        return _refuse_missing
    return _call_dotted_path if _DOTTED_PATH.fullmatch(path) else _read_datasets


def _read_jsonl(source: DataSource) -> list[Row]:
    rows = []
    for number, line in read_lines(source.path):
        if not line.strip():
            continue
        where = f"{source.path}, line {number}"
        row = parse_json(line, where)
        if not isinstance(row, dict):
            raise ValueError(f"{where}: {_shorten(row)} is not a JSON object of columns")
        rows.append(row)
        if len(rows) == source.limit:
            break
    return rows


def _read_parquet(source: DataSource) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    path = source.location
    if not path.exists():
        _refuse_missing(source)
    if not path.is_file():
        raise ValueError(f"{source.path} is a directory, not a Parquet file")
    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{source.path} is not a readable Parquet file: {error}") from error


def _read_datasets(source: DataSource) -> list[Row]:
    import datasets

    try:
        path = str(source.location) if source.location.is_dir() else source.path
        table = datasets.load_dataset(path, source.name, split=source.split)
    except datasets.exceptions.DatasetGenerationError as error:  # files that cannot be read, or of other columns
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(
            f"data set {source.path!r} (name={source.name!r}, split={source.split!r}) was found, but its files cannot"
            f" be read as one table: {reason}. Mend them, or name one .jsonl or .parquet file"
        ) from error
    except (OSError, ValueError) as error:  # not found, offline, no such split, no such configuration
        raise ValueError(
            f"data set {source.path!r} (name={source.name!r}, split={source.split!r}) could not be loaded: {error}. "
            f"It is neither a .jsonl or .parquet file nor a dotted path, so it was looked up with "
            f"datasets.load_dataset: check name and split, and the network on the first use"
        ) from error
    if source.limit is not None:
        table = table.select(range(min(source.limit, len(table))))
    return table.to_list()


def _call_dotted_path(source: DataSource) -> list[Row]:
    module, _, attribute = source.path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{source.path!r} is no file, and as a dotted path of a callable it cannot be imported: {error}"
        ) from error
    return function()


def _refuse_suffix(source: DataSource) -> list[Row]:
    raise ValueError(
        f"{source.path}: unknown suffix {Path(source.path).suffix!r}; files are read as {sorted(_FILE_READERS)}: "
        f"convert the file, or give a directory or hub name for datasets.load_dataset, or a Python callable"
    )


def _refuse_missing(source: DataSource) -> list[Row]:
    raise ValueError(f"{source.path}: no such file or directory (working directory: {Path.cwd()})")


def _shorten(value: Any, length: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= length else text[: length - 1] + "…"


_FILE_READERS: dict[str, Callable[[DataSource], list[Row]]] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
