"""The end of a rank on another host is noticed: three processes, one of which goes."""

import json
import signal
import socket
import subprocess
import sys
import time

import pytest

from lightning_megatron_rl.parallel.presence import GRACE_S
from tests.distributed import ROOT

# rank 0 prints where it listens; each rank follows the words on its standard input
RANK = """
import json, logging, sys
from lightning_megatron_rl.parallel.presence import Meeting, Presence
logging.basicConfig()
rank = int(sys.argv[1])
presence = Presence(["node-a", "node-b", "node-c"], rank, 4.0)
if rank == 0:
    print(json.dumps(vars(presence.listen("127.0.0.1"))), flush=True)
else:
    presence.connect(Meeting(**json.loads(sys.argv[2])))
    print("there", flush=True)
for line in sys.stdin:
    getattr(presence, line.strip())()
    print("done", flush=True)
"""
NOTICED = GRACE_S + 5.0  # seconds; the first is what a rank's own error gets


class Ranks:
    """Three processes."""

    def __init__(self) -> None:
        self.processes = [self._start(0)]
        self.meeting = json.loads(self.processes[0].stdout.readline())
        for rank in (1, 2):
            self.processes.append(self._start(rank, json.dumps(self.meeting)))
            assert self.processes[rank].stdout.readline() == "there\n"

    def _start(self, *arguments: object) -> "subprocess.Popen[str]":
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-c", RANK, *map(str, arguments)], **pipes, text=True, cwd=ROOT)

    def tell(self, rank: int, word: str) -> None:
        process = self.processes[rank]
        process.stdin.write(f"{word}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"

    def end(self, rank: int) -> tuple[int, str]:
        """Exit code and errors of a rank that ends by itself."""
        process = self.processes[rank]
        process.wait(NOTICED)
        return process.returncode, process.stderr.read()


@pytest.fixture
def ranks():
    running = Ranks()
    yield running
    for process in running.processes:
        process.kill()
        process.communicate()


def test_a_killed_rank_ends_all_others_by_name(ranks):
    ranks.processes[1].send_signal(signal.SIGKILL)
    for rank in (0, 2):
        code, errors = ranks.end(rank)
        assert code == 1
        assert (
            f"rank {rank} on host {socket.gethostname()} ends: rank 1 on host node-b has ended or was killed" in errors
        )


def test_the_end_of_rank_zero_ends_all_others_by_name(ranks):
    ranks.processes[0].send_signal(signal.SIGKILL)
    for rank in (1, 2):
        code, errors = ranks.end(rank)
        assert code == 1
        assert "rank 0 on host node-a has ended or was killed" in errors


def test_ranks_leave_as_they_like_when_the_run_has_ended(ranks):
    for rank in range(3):
        ranks.tell(rank, "rest")
    ranks.processes[1].kill()
    ranks.processes[0].kill()
    time.sleep(1.0)
    ranks.tell(2, "rest")  # it answers
    assert ranks.processes[2].poll() is None


def test_a_rank_that_rests_while_others_work_may_leave(ranks):
    ranks.tell(1, "rest")
    ranks.processes[1].kill()
    time.sleep(1.0)
    ranks.tell(0, "watch")
    assert ranks.processes[0].poll() is None


@pytest.mark.slow
def test_strangers_change_nothing(ranks):
    """Nor do those who connect and say nothing keep the end of a rank from being noticed."""
    place = ranks.meeting["address"], ranks.meeting["port"]
    silent = socket.create_connection(place)
    for words in (b"", b"wrong 1\n", b"0" * 9000, f"{ranks.meeting['token']} 77\n".encode(), b"\xff\xfe \xff\n"):
        with socket.create_connection(place) as stranger:
            stranger.sendall(words)
    time.sleep(0.5)
    ranks.tell(0, "watch")
    ranks.processes[1].send_signal(signal.SIGKILL)
    assert "rank 1 on host node-b" in ranks.end(2)[1]
    silent.close()
