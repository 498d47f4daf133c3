"""Fixtures of the data tests."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tokenizer_dir(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the character tokenizer."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows to a JSONL file and returns its path."""

    def write(rows: list[dict], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write
