"""Locks tell who lives; a destination is tried without a trace."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron_rl.utilities.files import (
    Lock,
    LockedDirectory,
    check_local,
    check_writable,
    create,
    is_url,
    numbered,
    write_whole,
)
from tests.full_disk import files_of_at_most


def held(path: Path) -> bool | None:
    with closing(Lock(path)) as lock:
        return lock.held


def test_a_lock_is_one_writers(tmp_path: Path):
    made = LockedDirectory(tmp_path / "deep" / "made")
    assert held(made.path) is False
    made.unlock()
    assert held(made.path) is True
    made.abandon()
    assert made.path.is_dir(), "it is somebody else's"


def test_a_lock_on_what_has_lost_its_name_is_none(tmp_path: Path):
    """Another process removes it, or gives the name to something else, before it is locked."""
    path, real = tmp_path / "left", os.open

    def open_and(replaced: bool) -> Any:
        def act(*arguments: Any) -> int:
            descriptor = real(*arguments)
            path.rmdir()
            if replaced:
                (tmp_path / "other").mkdir()
                (tmp_path / "other").rename(path)
            return descriptor

        return act

    for replaced in (True, False):
        path.mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "open", open_and(replaced))
            assert held(path) is False


@pytest.mark.parametrize("moment", ["before it is opened", "before it is locked"])
def test_a_directory_that_goes_while_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str):
    """The error is that of one that another process is writing, and nothing stays locked."""
    path, real = tmp_path / "made", os.open

    def act(*arguments: Any) -> int:
        if moment == "before it is opened":
            path.rmdir()
        descriptor = real(*arguments)
        if moment == "before it is locked":
            path.rmdir()
        return descriptor

    descriptors = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "open", act)
    with pytest.raises(OSError, match=r"another process is writing .*made: wait for it, or choose another directory"):
        LockedDirectory(path)
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_a_destination_that_takes_no_files_is_named(tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    tail = f"cannot be written: {file}: Not a directory. Choose another directory."
    with pytest.raises(OSError) as caught:
        check_writable(file / "deep" / "out")
    assert str(caught.value) == f"{file}/deep/out {tail}"
    with pytest.raises(OSError) as caught:
        check_writable(file / "out", "HFExport(dirpath)")
    assert str(caught.value) == f"HFExport(dirpath)='{file}/out' {tail}"


def test_a_destination_is_tried_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    check_writable(tmp_path / "deep" / "out", "dirpath")
    check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.chdir(tmp_path)
    check_writable(Path("deep/out"))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_looked_into_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another user's, say; the tests' own user may look into all of them."""
    closed, real_stat, real_open = tmp_path / "closed", os.stat, os.open
    closed.mkdir()

    def stat(path: Any, *arguments: Any, **keywords: Any) -> os.stat_result:
        if str(path).startswith(f"{closed}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return real_stat(path, *arguments, **keywords)

    def refuse(path: Any, *arguments: Any, **keywords: Any) -> int:
        if str(path).startswith(str(closed)):
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, *arguments, **keywords)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match=rf"dirpath='{closed}/deep/out' cannot be written: {closed}: Permission denied"):
        check_writable(closed / "deep" / "out", "dirpath")


# as they are written, and what pathlib and os.path.realpath make of them
URLS = [
    "memory://a",
    "s3://b/c",
    "local:///d",
    "file:///e",
    "gs://f",
    "simplecache::s3://g",
    "memory:/a",
    "/here/file:/e",
    "S3://b",
]


@pytest.mark.parametrize("path", URLS)
def test_urls_are_no_paths(path):
    assert is_url(path)
    assert is_url(Path(path))
    with pytest.raises(ValueError, match=r"setting='.*' is a URL \(\w+\), .* Give a plain path"):
        check_local(path, "setting")
    with pytest.raises(ValueError, match="is a URL"):
        check_writable(Path(path), "setting")


@pytest.mark.parametrize(
    "path", ["runs/1", "/a/b-c.d", "runs/12:30:05/x", "runs/lr=1e-3,step=2", "../x", "~/runs", "a:b"]
)
def test_paths_are_no_urls(path):
    assert not is_url(path)
    check_local(path, "setting")


def test_a_name_is_given_to_one(tmp_path):
    """The first that is free, whoever else is looking."""
    names = numbered(tmp_path / "a.b.jsonl")
    assert [next(names).name for _ in range(3)] == ["a.b.jsonl", "a.b-2.jsonl", "a.b-3.jsonl"]
    assert create(tmp_path / "a")
    assert not create(tmp_path / "a")


def test_nothing_is_left_of_a_file_for_which_there_is_no_room(tmp_path):
    """And what was there stays."""
    place = tmp_path / "report.html"
    write_whole(place, "the first")
    with files_of_at_most(100), pytest.raises(OSError, match="File too large"):
        write_whole(place, "the second " * 100)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"report.html": "the first"}
    write_whole(place, "half of a character: \ud800", errors="backslashreplace")
    assert place.read_text() == "half of a character: \\ud800"
