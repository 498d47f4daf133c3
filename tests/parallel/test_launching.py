"""What ranks are started with: a port that nobody else takes meanwhile, and whose end is theirs, too."""

import errno
import json
import os
import socket
import sys

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_megatron_rl.parallel.launching import RankLauncher
from lightning_megatron_rl.parallel.leader import LEADER

NAMES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
RANK = """
import json, os, socket, sys
def outcome(call):
    try:
        call(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    except OSError as error:
        return error.errno
with open(sys.argv[1], "w") as file:
    names = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "LIGHTNING_MEGATRON_RL_LEADER")
    found = {name: os.environ.get(name) for name in names}
    json.dump({**found, "bind": outcome(socket.socket().bind), "connect": outcome(socket.socket().connect)}, file)
"""


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Start a second rank that notes what it was started with; returns the launcher and the notes."""
    (tmp_path / "rank.py").write_text(RANK)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "rank.py"), str(tmp_path / "notes.json")])
    monkeypatch.setattr(
        sys.modules["__main__"], "__spec__", None
    )  # pytest may run as a module, which Lightning repeats
    for name in NAMES:
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("MASTER_PORT")
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("NODE_RANK")

    def launch():
        launcher = RankLauncher(LightningEnvironment(), num_processes=2, num_nodes=1)
        launcher.launch(lambda: None)
        assert [process.wait() for process in launcher.procs] == [0]
        return launcher, json.loads((tmp_path / "notes.json").read_text())

    return launch


def test_port_is_held_until_rank_zero_listens(launched):
    launcher, notes = launched()
    port = int(os.environ["MASTER_PORT"])
    assert notes["MASTER_PORT"] == str(port)
    assert notes["bind"] == errno.EADDRINUSE  # whoever looks for a port meanwhile
    assert notes["connect"] == errno.ECONNREFUSED  # a rank that is early tries again
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    launcher.release_port()
    socket.create_server(("127.0.0.1", port)).close()
    launcher.release_port()


def test_port_that_the_user_has_chosen_is_left_to_him(launched, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29123")
    launcher, notes = launched()
    assert notes["MASTER_PORT"] == "29123"
    assert launcher._held is None


def test_rank_is_told_who_started_it(launched):
    launcher, notes = launched()
    launcher.release_port()
    assert notes[LEADER] == str(os.getpid())
    assert notes["LOCAL_RANK"] == "1"
    assert LEADER not in os.environ
