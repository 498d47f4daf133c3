"""Locks tell who lives."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron_rl.files import Lock, LockedDirectory


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
