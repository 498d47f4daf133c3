"""Directories change at once: at every moment a name stands for something whole, or for nothing."""

import fcntl
import os
import shutil
import signal
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron_rl.checkpoints import directories
from lightning_megatron_rl.checkpoints.directories import (
    UnfinishedDirectory,
    is_linked,
    remove,
    remove_unfinished,
    replace,
    share_files,
    switch_link,
)
from lightning_megatron_rl.checkpoints.manifest import is_checkpoint, write_manifest
from lightning_megatron_rl.utilities import files

OURS = ".lightning-megatron-rl-"


def checkpoint(path: Path, content: str = "x") -> Path:
    path.mkdir()
    (path / "content").write_text(content)
    write_manifest(path, {"global_step": 1}, {})
    return path


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def write(path: Path, content: str, *, reserve: bool = False) -> None:
    unfinished = UnfinishedDirectory(path, reserve=reserve)
    (unfinished.path / "content").write_text(content)
    write_manifest(unfinished.path, {"global_step": 1}, {})
    unfinished.publish()


@pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "renamed_twice"])
def test_published_in_place_of_what_was_there(tmp_path, monkeypatch, exchange):
    """Nothing, a name kept free, a checkpoint, a file, a link; and no trace of it."""
    if not exchange:
        monkeypatch.setattr(directories, "_exchange", lambda left, right: False)
    path = tmp_path / "a.ckpt"
    for number, reserve in enumerate([False, True, True]):
        write(path, f"content {number}", reserve=reserve)
        assert (path / "content").read_text() == f"content {number}"
        assert names(tmp_path) == ["a.ckpt"]
    remove(path)
    path.write_text("a file")
    write(path, "over a file")
    remove(path)
    other = checkpoint(tmp_path / "b.ckpt")
    path.symlink_to("b.ckpt")
    write(path, "over a link")
    assert (path / "content").read_text() == "over a link"
    assert (other / "content").read_text() == "x"
    assert names(tmp_path) == ["a.ckpt", "b.ckpt"]


def test_a_name_always_stands_for_a_whole_checkpoint(tmp_path):
    """Another process that looks at any moment finds the old or the new one, under a name and behind a link."""
    path, link = checkpoint(tmp_path / "last.ckpt"), tmp_path / "link.ckpt"
    targets = [checkpoint(tmp_path / f"{number}.ckpt") for number in range(2)]
    switch_link(link, targets[0])
    missing, done = [], threading.Event()

    def look() -> None:
        while not done.is_set():
            missing.extend(entry.name for entry in (path, link) if not is_checkpoint(entry))

    looking = threading.Thread(target=look)
    looking.start()
    for number in range(60):
        write(path, "y")
        switch_link(link, targets[number % 2])
    done.set()
    looking.join()
    assert not missing
    assert link.resolve() == targets[1]
    assert os.readlink(link) == "1.ckpt", "the directory can be moved"
    assert names(tmp_path) == ["0.ckpt", "1.ckpt", "last.ckpt", "link.ckpt"]


def test_a_link_takes_the_place_of_a_checkpoint(tmp_path):
    """A run with `save_last=True` goes on with `save_last="link"`."""
    link, target = checkpoint(tmp_path / "last.ckpt"), checkpoint(tmp_path / "a.ckpt", "target")
    switch_link(link, target)
    assert (link / "content").read_text() == "target"
    assert names(tmp_path) == ["a.ckpt", "last.ckpt"]
    assert is_linked(target)
    link.unlink()
    assert not is_linked(target)


def test_what_a_killed_run_left_is_removed(tmp_path):
    """Half a checkpoint, the name that was kept for it, half a removal; nothing whole."""
    checkpoint(tmp_path / "a.ckpt")
    for hidden in (f".b.ckpt{OURS}incomplete", f".c.ckpt{OURS}removed", f".a.ckpt{OURS}replaced", ".notes"):
        (tmp_path / hidden).mkdir()
        (tmp_path / hidden / "content").write_text("x")
    (tmp_path / "b.ckpt").mkdir()
    (tmp_path / f".e.ckpt{OURS}incomplete").mkdir()  # killed as soon as it was made
    (tmp_path / f".f.ckpt{OURS}incomplete").write_text("x")  # a file that a checkpoint has just taken the place of
    checkpoint(tmp_path / f".d.ckpt{OURS}replaced")  # killed between two renames
    remove_unfinished(tmp_path)
    assert names(tmp_path) == [".notes", "a.ckpt", "d.ckpt"]
    assert is_checkpoint(tmp_path / "d.ckpt")


def test_what_others_have_there_stays(tmp_path):
    """Files, directories, checkpoints: none of them has a hidden name of this package."""
    (tmp_path / ".notes.removed").write_text("x")
    for name in (".old.replaced", ".work.incomplete", ".q.ckpt.incomplete", ".q.ckpt.replaced"):
        (tmp_path / name).mkdir()
    (tmp_path / ".work.incomplete" / "content").write_text("x")
    checkpoint(tmp_path / ".mine.replaced")
    before = names(tmp_path)
    write(tmp_path / "q.ckpt", "x", reserve=True)
    write(tmp_path / "q.ckpt", "y")
    switch_link(tmp_path / "link.ckpt", tmp_path / "q.ckpt")
    remove_unfinished(tmp_path)
    assert names(tmp_path) == sorted([*before, "q.ckpt", "link.ckpt"])
    assert (tmp_path / ".work.incomplete" / "content").read_text() == "x"
    assert (tmp_path / ".notes.removed").read_text() == "x"


def test_what_cannot_be_opened_is_another_users(tmp_path, monkeypatch):
    """In a directory that several use."""
    theirs = tmp_path / f".theirs.ckpt{OURS}incomplete"
    theirs.mkdir()
    real = os.open

    def refuse(path: Path, *arguments: int, **keywords: int) -> int:
        if Path(path) == theirs:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", refuse)
    write(tmp_path / "a.ckpt", "x")
    assert names(tmp_path) == [theirs.name, "a.ckpt"]


def kill_at(point: str, occurrence: int) -> None:
    """Let this process kill itself at the n-th call of a function of `directories`, or when `_exchange` is done."""
    module: Any = files if point == "Lock" else directories
    real, calls = getattr(module, point), [0]

    def die(*arguments: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] == occurrence and point != "_exchange":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **keywords)
        if calls[0] == occurrence:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, point, die)


@pytest.mark.parametrize(
    ("point", "occurrence"),
    [("Lock", 1), ("fsync", 1), ("replace", 1), ("_delete", 1), ("_exchange", 1), ("_delete", 2), ("fsync", 2)],
)
@pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "renamed_twice"])
@pytest.mark.parametrize("old", ["checkpoint", "file", "link"])
def test_nothing_is_left_of_a_save_that_was_killed(tmp_path, monkeypatch, point, occurrence, exchange, old):
    """Whether it was about to replace a checkpoint or a file, or to switch a link; the next save finds all well."""
    path, target = tmp_path / "a.ckpt", checkpoint(tmp_path / "b.ckpt")
    if old == "file":
        path.write_text("a file")
    else:
        checkpoint(path)
    child = os.fork()
    if child == 0:
        try:
            if not exchange:
                monkeypatch.setattr(directories, "_exchange", lambda left, right: False)
            kill_at(point, occurrence)
            if old == "link":
                switch_link(path, target)
            else:
                write(path, "new")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (-signal.SIGKILL, 0)  # 0: it does not come by there
    remove_unfinished(tmp_path)
    if old == "checkpoint":
        assert is_checkpoint(path), "at each moment there is the old or the new one, or a fit puts it right"
    if old == "link":
        switch_link(path, target)
    else:
        write(path, "newer")
        assert (path / "content").read_text() == "newer"
    assert names(tmp_path) == ["a.ckpt", "b.ckpt"]


def test_what_another_run_is_writing_stays(tmp_path):
    unfinished = UnfinishedDirectory(tmp_path / "a.ckpt", reserve=True)
    remove_unfinished(tmp_path)
    assert names(tmp_path) == [f".a.ckpt{OURS}incomplete", "a.ckpt"]
    with pytest.raises(OSError, match=r"another process is writing .*-incomplete: wait for it, or choose another"):
        UnfinishedDirectory(tmp_path / "a.ckpt", reserve=True)
    unfinished.abandon()
    assert names(tmp_path) == []


def test_the_name_that_is_kept_goes_before_what_tells_whose_it_is(tmp_path, monkeypatch):
    """Whoever is killed while it tidies up leaves no empty directory for ever."""
    unfinished = UnfinishedDirectory(tmp_path / "a.ckpt", reserve=True)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        unfinished.abandon()
    assert names(tmp_path) == [f".a.ckpt{OURS}incomplete"]
    unfinished.unlock()
    (tmp_path / "a.ckpt").mkdir()
    with pytest.raises(KeyboardInterrupt):
        remove_unfinished(tmp_path)
    assert names(tmp_path) == [f".a.ckpt{OURS}incomplete"]


def test_what_is_published_can_be_written_again(tmp_path):
    """Its lock goes with its hidden name, and giving up afterwards takes nothing from the next writer."""
    first = UnfinishedDirectory(tmp_path / "a.ckpt", reserve=True)
    write_manifest(first.path, {"global_step": 1}, {})
    first.publish()
    with closing(files.Lock(tmp_path / "a.ckpt")) as lock:
        assert lock.held
    second = UnfinishedDirectory(tmp_path / "a.ckpt", reserve=True)
    first.abandon()
    assert names(tmp_path) == [f".a.ckpt{OURS}incomplete", "a.ckpt"]
    assert is_checkpoint(tmp_path / "a.ckpt")
    second.abandon()


def test_what_takes_the_place_of_something_left_stays(tmp_path, monkeypatch):
    """Between the look at a directory and its lock another run clears it away and begins."""
    left = tmp_path / f".a.ckpt{OURS}incomplete"
    left.mkdir()
    real, begun = fcntl.flock, []

    def begin(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        left.rmdir()
        begun.append(UnfinishedDirectory(tmp_path / "a.ckpt", reserve=True))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", begin)
    remove_unfinished(tmp_path)
    assert names(tmp_path) == [left.name, "a.ckpt"]
    begun[0].abandon()


def test_nobody_begins_in_what_is_being_removed(tmp_path, monkeypatch):
    left = tmp_path / f".a.ckpt{OURS}incomplete"
    left.mkdir()
    real = directories._delete

    def begin(path: Path) -> None:
        with pytest.raises(OSError, match="another process is writing"):
            UnfinishedDirectory(tmp_path / "a.ckpt", reserve=True)
        real(path)

    monkeypatch.setattr(directories, "_delete", begin)
    remove_unfinished(tmp_path)
    assert names(tmp_path) == []


def test_without_locks_only_the_own_name_is_cleared(tmp_path, monkeypatch):
    """A file system that has none does not tell who is alive."""

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    for name in ("a", "b"):
        (tmp_path / f".{name}.ckpt{OURS}incomplete").mkdir()
    write(tmp_path / "a.ckpt", "x")
    assert names(tmp_path) == [f".b.ckpt{OURS}incomplete", "a.ckpt"]


def test_a_name_that_is_taken_is_not_given_back(tmp_path):
    path = checkpoint(tmp_path / "a.ckpt")
    UnfinishedDirectory(path, reserve=True).abandon()
    assert is_checkpoint(path)
    assert names(tmp_path) == ["a.ckpt"]


def test_only_checkpoints_are_deleted(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "precious.txt").write_text("x")
    with pytest.raises(ValueError, match="refusing to delete"):
        remove(precious)
    path, link = checkpoint(tmp_path / "a.ckpt"), tmp_path / "link.ckpt"
    link.symlink_to("a.ckpt")
    remove(link)
    assert is_checkpoint(path), "a link is removed, not what it points to"
    remove(path)
    remove(path)  # gone already
    assert names(tmp_path) == ["precious"]


def test_shared_files_are_links_or_copies(tmp_path, monkeypatch):
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "file").write_text("content")
    share_files(source, tmp_path / "linked")
    assert (tmp_path / "linked" / "deep" / "file").samefile(source / "deep" / "file")

    def no_links(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", no_links)
    share_files(source, tmp_path / "copied")
    assert not (tmp_path / "copied" / "deep" / "file").samefile(source / "deep" / "file")
    assert (tmp_path / "copied" / "deep" / "file").read_text() == "content"


def test_old_one_may_be_gone_when_it_was_exchanged(tmp_path, monkeypatch):
    """Under its hidden name nobody has locked it, and another save in this directory tidies up."""
    write(tmp_path / "a.ckpt", "old")
    exchange = directories._exchange

    def exchange_and_tidy_up(left: Path, right: Path) -> bool:
        done = exchange(left, right)
        directories.remove_unfinished(tmp_path)
        return done

    monkeypatch.setattr(directories, "_exchange", exchange_and_tidy_up)
    write(tmp_path / "a.ckpt", "new")
    assert (tmp_path / "a.ckpt" / "content").read_text() == "new"
    assert names(tmp_path) == ["a.ckpt"]


def test_exchange_falls_back_only_where_it_is_not_known(tmp_path):
    """Other errors are the caller's."""
    (tmp_path / "a").mkdir()
    with pytest.raises(FileNotFoundError):
        directories._exchange(tmp_path / "a", tmp_path / "nothing")
    with pytest.raises(FileNotFoundError):
        replace(tmp_path / "nothing", tmp_path / "a")
