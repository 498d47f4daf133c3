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
    with pytest.raises(ValueError, match="limit=0 leaves no rows"):
        DataSource("a.jsonl", limit=0)


def test_missing_column_lists_those_there_are():
    assert column(ROWS[0], "question", "row 0") == "0+1?"
    with pytest.raises(ValueError, match=r"row 7 has no column 'prompt'; its columns are \['answer', 'question'\]"):
        column(ROWS[0], "prompt", "row 7")
