import gzip
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lightning_megatron_rl.data.sources import DataSource, column, describe_source, load_rows, needs_download

ROWS = [{"question": f"{i}+1?", "answer": f"… #### {i + 1}"} for i in range(4)]


def some_rows() -> list[dict[str, Any]]:
    return ROWS


def no_list() -> Any:
    return {"prompt": ["a"]}


def no_dicts() -> list[Any]:
    return ["a"]


@pytest.fixture
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory laid out like a hub data set; `datasets` reads splits from the whole path, so no "test" in it."""
    directory = tmp_path_factory.mktemp("hub")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), directory / "train.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[2:]), directory / "test.parquet")
    return directory


def test_jsonl(write_jsonl):
    path = write_jsonl(ROWS)
    assert load_rows(path) == ROWS
    assert load_rows(DataSource(path, limit=2)) == ROWS[:2]
    with Path(path).open("a") as file:
        file.write("\n\n")  # blank lines are no rows
    assert load_rows(path) == ROWS


def test_parquet(parquet: Path):
    assert load_rows(str(parquet / "train.parquet")) == ROWS
    assert load_rows(DataSource(str(parquet / "train.parquet"), limit=3)) == ROWS[:3]


def test_datasets_directory(parquet: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", parquet / "cache")
    assert load_rows(str(parquet)) == ROWS
    assert load_rows(DataSource(str(parquet), split="test")) == ROWS[2:]
    assert load_rows(DataSource(str(parquet), split="train", limit=1)) == ROWS[:1]
    with pytest.raises(ValueError, match=r"split='nope'\) could not be loaded: Unknown split"):
        load_rows(DataSource(str(parquet), split="nope"))


def test_callables():
    assert load_rows(some_rows) == ROWS
    assert load_rows(f"{__name__}.some_rows") == ROWS
    assert load_rows(DataSource(f"{__name__}.some_rows", limit=1)) == ROWS[:1]


def test_only_hub_names_and_directories_are_prepared_once_per_node(tmp_path: Path):
    assert needs_download("openai/gsm8k")
    assert needs_download(DataSource("squad", split="test"))
    assert needs_download(str(tmp_path))
    for source in ("a.jsonl", "b/c.parquet", f"{__name__}.some_rows", some_rows, "b/c.csv", "./nothing"):
        assert not needs_download(source)
    assert describe_source(DataSource("openai/gsm8k", split="test")) == "'openai/gsm8k' (split 'test')"
    assert describe_source(some_rows) == "some_rows"


def test_malformed_jsonl_names_file_and_line(write_jsonl):
    path = write_jsonl(ROWS[:2])
    with Path(path).open("a") as file:
        file.write('\n{"prompt": "x",}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 4: not valid JSON .*at column 16"):
        load_rows(path)
    Path(path).write_text("[1, 2]\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: \[1, 2\] is not a JSON object"):
        load_rows(path)


def test_what_cannot_be_read_is_refused(write_jsonl, tmp_path: Path):
    broken = tmp_path / "broken.parquet"
    broken.write_text("not parquet")
    existing = tmp_path / "rows.xyz"
    existing.write_text("")
    for source, message in [
        (write_jsonl([], "empty.jsonl"), r"empty\.jsonl' is an empty data set: 0 rows"),
        ("missing.jsonl", r"missing\.jsonl: no such file.*working directory"),
        ("missing.parquet", r"missing\.parquet: no such file"),
        ("./missing", r"\./missing: no such file"),
        ("data/a/b", r"data/a/b: no such file"),
        ("data/rows.csv", r"unknown suffix '.csv'; files are read as \['.jsonl', '.parquet'\]"),
        (str(existing), r"unknown suffix '.xyz'"),
        (str(broken), r"broken\.parquet is not a readable Parquet file"),
        (f"{__name__}.nope", r"'tests\.data\.test_sources\.nope' is no file.*cannot be imported: .*nope"),
        ("no_such_module.rows", r"cannot be imported: No module named"),
        (no_list, r"no_list returned dict, not a list of rows"),
        (no_dicts, r"row 0 of no_dicts is 'a', not a dict"),
        ("no-such-owner/no-such-set", r"'no-such-owner/no-such-set' .*could not be loaded: .*check name and split"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_rows(source)
    with pytest.raises(ValueError, match="limit=0 must be at least 1: null takes all rows"):
        DataSource("a.jsonl", limit=0)
    for empty in ("", "  "):
        with pytest.raises(ValueError, match=r"a data set's path is '\s*': name a .jsonl or .parquet file"):
            DataSource(empty)


@pytest.mark.parametrize("options", [{"split": "test"}, {"name": "main"}])
def test_parts_of_what_has_none_are_refused(options: dict[str, str], write_jsonl, parquet: Path):
    """All rows were read, those of training for a validation."""
    for path in (write_jsonl(ROWS), str(parquet / "train.parquet"), f"{__name__}.some_rows"):
        assert load_rows(DataSource(path, split="train")) == ROWS
        (key,) = options
        with pytest.raises(ValueError, match=rf"{key}='{options[key]}': a file or a callable gives all its rows"):
            load_rows(DataSource(path, **options))


def test_files_of_another_kind_are_named(tmp_path: Path):
    text = '{"prompt": "é"}\n'
    kinds = {
        "utf16.jsonl": (text.encode("utf-16"), r"utf16\.jsonl is UTF-16, not UTF-8: convert it with iconv"),
        "utf16le.jsonl": (text.encode("utf-16-le"), r"utf16le\.jsonl, line 1: it holds NUL bytes"),
        "latin1.jsonl": (
            ("{}\n" + text).encode("latin-1"),
            r"latin1\.jsonl, line 2: byte 0xe9 at column 13 is not UTF-8",
        ),
        "packed.jsonl": (
            gzip.compress(text.encode()),
            r"packed\.jsonl is gzip-compressed, not text: unpack it with gunz",
        ),
        "deep.jsonl": (b"{}\n" + b"[" * 200_000 + b"\n", r"deep\.jsonl, line 2: the JSON is nested too deep"),
        "digits.jsonl": (b'{"a": ' + b"7" * 9000 + b"}", r"digits\.jsonl, line 1: Exceeds the limit"),
        "half.jsonl": (b'{"prompt": "\\ud83d"}', r"half\.jsonl, line 1: the JSON holds half of a character"),
        "empty.parquet": (b"", r"empty\.parquet is not a readable Parquet file"),
    }
    for name, (content, message) in kinds.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_rows(str(tmp_path / name))
    for name in ("x.jsonl.d/x.jsonl", "x.parquet"):
        (tmp_path / name).mkdir(parents=True)
        with pytest.raises(ValueError, match=f"{name} is a directory, not a"):
            load_rows(str(tmp_path / name))
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match=r"pipe\.jsonl is no plain file"):
        load_rows(str(tmp_path / "pipe.jsonl"))


def test_home_directory_byte_mark_and_whole_characters(write_jsonl, tmp_path: Path, monkeypatch, parquet: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(ROWS)
    assert load_rows("~/rows.jsonl") == ROWS
    shutil.copy(parquet / "train.parquet", tmp_path)
    assert load_rows(DataSource("~/train.parquet", limit=2)) == ROWS[:2]
    with pytest.raises(ValueError, match=r"~/nothing\.jsonl: no such file"):
        load_rows("~/nothing.jsonl")
    (tmp_path / "marked.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "\\ud83d\\ude00"}\r\n')
    assert load_rows("~/marked.jsonl") == [{"prompt": "😀"}]


def test_missing_column_lists_those_there_are():
    assert column(ROWS[0], "question", "row 0") == "0+1?"
    with pytest.raises(ValueError, match=r"row 7 has no column 'prompt'; its columns are \['answer', 'question'\]"):
        column(ROWS[0], "prompt", "row 7")


def test_directory_whose_files_are_no_table_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (data / "b.jsonl").write_text('{"question": "1+1=", "solution": "2"}\n')
    with pytest.raises(ValueError, match=rf"'{data}' .*its files cannot be read as one table: .*solution"):
        load_rows(str(data))
