"""The directory of an engine's sockets goes with its owner, however that ends."""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lightning_megatron_rl.rollout.vllm.sockets import SocketDirectory

OWNER = """
import sys
from lightning_megatron_rl.rollout.vllm.sockets import SocketDirectory
directory = SocketDirectory()
(directory.path / "socket").touch()
print(directory.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # read again
    return tmp_path


def test_it_is_private_and_removed_with_what_is_in_it(temporary):
    directory = SocketDirectory()
    (directory.path / "socket").touch()
    assert directory.path.parent == temporary
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.close()
    directory.close()
    assert list(temporary.iterdir()) == []
    del directory


def test_dropped_one_is_removed_and_a_fork_leaves_it(temporary):
    directory = SocketDirectory()
    if os.fork() == 0:
        directory.close()
        os._exit(0)
    os.wait()
    assert directory.path.is_dir()
    del directory
    assert list(temporary.iterdir()) == []


def test_what_killed_runs_left_is_removed_and_what_lives_stays(temporary):
    owners = [
        subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    killed, living = (Path(owner.stdout.readline().strip()) for owner in owners)
    owners[0].kill()
    owners[0].wait()
    assert (killed / "socket").exists()
    directory = SocketDirectory()
    assert not killed.exists()
    assert (living / "socket").exists()
    owners[1].communicate("")
    assert not living.exists()  # at the end of its interpreter
    directory.close()
    owners[0].communicate()


@pytest.mark.parametrize("moment", ["before it is opened", "while it is locked", "before it is locked"])
def test_one_that_another_run_removes_at_its_birth_is_made_again(temporary, monkeypatch, moment):
    """Another run took it for a dead one's, since it was not locked yet."""
    born: list[Path] = []
    others: list[int] = []
    make, lock = tempfile.mkdtemp, fcntl.flock

    def make_and_look(**options):
        born.append(Path(make(**options)))
        if len(born) == 1 and moment == "before it is opened":
            born[0].rmdir()
        elif len(born) == 1 and moment == "while it is locked":
            others.append(os.open(born[0], os.O_RDONLY))
            lock(others[0], fcntl.LOCK_EX)
        return str(born[-1])

    def remove_and_lock(descriptor, operation):
        if len(born) == 1 and moment == "before it is locked":
            born[0].rmdir()
        lock(descriptor, operation)

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_look)
    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    directory = SocketDirectory()
    assert directory.path == born[1]
    (directory.path / "socket").touch()
    directory.close()
    for descriptor in others:
        os.close(descriptor)
