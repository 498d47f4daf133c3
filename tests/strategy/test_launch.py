"""Real launches of a user's script by every launcher, and what happens to the others when one rank is lost."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest

from lightning_megatron_rl.parallel import leader
from tests.distributed import CHILD_PATH, ROOT, free_port
from tests.selection import by_default
from tests.strategy.test_megatron import RELATIVE
from tests.training import fit_sft

SCRIPT = "tests.strategy.launch_script"
DEADLINE = 150.0  # seconds for a launch; about 20 on an idle machine with two cores, nearly all of it imports
END_OF_OTHERS = 30.0  # seconds after which no other rank may live; Lightning looks at its children every 5 s


class Launch:
    """Processes of one launch, all of them ended at the end of the test."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *command: str, **environment: str) -> None:
        number = len(self.processes)
        log = (self.out / f"{number}.log").open("w")
        variables = {"PYTHONPATH": CHILD_PATH, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
        self.processes.append(
            subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
                cwd=ROOT,
            )
        )
        log.close()

    def start_apart(self, *command: str) -> None:
        """Start two ranks as SLURM does: nobody ends one of them because the other is gone."""
        shared = {
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NAME": "train",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_NNODES": "1",
            "SLURM_NODEID": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        for rank in range(2):
            self.start(*command, **shared, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))

    def wait(self) -> list[int]:
        """Exit codes."""
        deadline = time.monotonic() + DEADLINE
        return [process.wait(max(1.0, deadline - time.monotonic())) for process in self.processes]

    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.out.glob("*.log")))

    def ranks(self) -> list[list[dict[str, float]]]:
        """What each rank logged, per step."""
        return [json.loads((self.out / f"{rank}.json").read_text()) for rank in range(2)]

    def seconds_of_others(self) -> float:
        """How long ranks outlive the process that was started."""
        gone = time.monotonic()
        while any(_is_rank(process, self.out) for process in psutil.process_iter()):
            assert time.monotonic() < gone + END_OF_OTHERS, self.output()
            time.sleep(0.1)
        return time.monotonic() - gone

    def kill(self) -> None:
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait()


def _is_rank(process: psutil.Process, out: Path) -> bool:
    try:
        return str(out) in process.cmdline()  # a zombie has none
    except psutil.Error:
        return False


@pytest.fixture
def launch(tmp_path):
    running = Launch(tmp_path)
    yield running
    running.kill()


@pytest.fixture(scope="module")
def expected(worker_pool, qwen3_dir) -> list[dict[str, float]]:
    """The same run on the shared workers."""
    return worker_pool.run(fit_sft, qwen3_dir, {}, 2, world_size=2, init_process_group=False)[0].steps


@pytest.mark.parametrize("launcher", by_default(["torchrun"], ["lightning", "torchrun", "slurm"]))
def test_every_launcher_gives_the_same_run(launch, qwen3_dir, expected, launcher):
    """A script with `Trainer(strategy="megatron", devices=2)` trains on two ranks however it is started."""
    script = ["-m", SCRIPT, "--model", str(qwen3_dir), "--out", str(launch.out)]
    if launcher == "lightning":
        launch.start(*script)
    elif launcher == "torchrun":
        launch.start("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), *script)
    else:
        launch.start_apart(*script)
    assert set(launch.wait()) == {0}, launch.output()
    for steps in launch.ranks():
        assert len(steps) == len(expected)
        for mine, theirs in zip(steps, expected, strict=True):
            for name, value in mine.items():
                assert value == pytest.approx(theirs[name], rel=RELATIVE), name


@pytest.mark.slow
def test_nobody_else_gets_the_port_of_a_run(launch, qwen3_dir):
    """Somebody tries when the port was chosen, and at the last moment before rank 0 listens there."""
    launch.start("-m", SCRIPT, "--model", str(qwen3_dir), "--out", str(launch.out), "--port-is-wanted")
    assert launch.wait() == [0], launch.output()
    attempts = (launch.out / "0.attempts").read_text().split()
    assert len(attempts) >= 2
    assert set(attempts) == {str(errno.EADDRINUSE)}


@pytest.mark.parametrize("launcher", by_default([], ["lightning", "torchrun"]))
def test_ranks_end_soon_after_the_first_was_refused(launch, qwen3_dir, launcher):
    """The other rank waits for it: for the data set that rank 0 alone prepares."""
    script = ["-m", SCRIPT, "--model", str(qwen3_dir), "--out", str(launch.out), "--refused-data"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    launch.start(*(torchrun if launcher == "torchrun" else []), *script)
    assert launch.wait() == [1], launch.output()
    assert launch.seconds_of_others() < leader.GRACE_S + 10.0  # a busy machine
    assert "ValueError: no such data set" in launch.output()


@pytest.mark.slow
def test_port_of_the_users_that_is_in_use_ends_all_ranks(launch, qwen3_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        script = ["-m", SCRIPT, "--model", str(qwen3_dir), "--out", str(launch.out)]
        launch.start(*script, MASTER_PORT=port)
        assert launch.wait() == [1], launch.output()
        assert launch.seconds_of_others() < leader.GRACE_S + 10.0  # a busy machine
    assert f"is in use: 127.0.0.1:{port}" in launch.output()


@pytest.mark.slow
def test_one_device_trains_in_an_interactive_interpreter(launch, qwen3_dir):
    """A notebook is one: Lightning refuses strategies there that start processes by running a script again."""
    launch.start("-i", "-m", SCRIPT, "--model", str(qwen3_dir), "--out", str(launch.out), "--devices", "1")
    assert launch.wait() == [0], launch.output()
    assert len(json.loads((launch.out / "0.json").read_text())) == 2, launch.output()


def test_several_devices_in_an_interactive_interpreter_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        ValueError, match=r"MegatronStrategy on 2 devices in a notebook.*Trainer\(devices=1\), or put the"
    ):
        pl.Trainer(strategy="megatron", accelerator="cpu", devices=2, logger=False)


@pytest.mark.slow  # tests/parallel/test_presence.py has it without a run
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_rank_ends_the_others_with_a_word(launch, qwen3_dir, rank):
    """A rank that is gone in the middle of a step leaves nobody waiting for the process-group timeout.

    Without a launcher that would end the other one: it ends by itself and says why.
    """
    launch.start_apart("-m", SCRIPT, "--model", str(qwen3_dir), "--out", str(launch.out), "--dying-rank", str(rank))
    lost, other = launch.processes[rank], launch.processes[1 - rank]
    assert lost.wait(DEADLINE) == 3, launch.output()
    assert other.wait(END_OF_OTHERS) != 0, launch.output()
    assert not list(launch.out.glob("*.json")), "the run went on to its end"
    output = launch.output()
    assert f"rank {1 - rank} (" in output, output
    assert "phase 'update'" in output
    # said before the run is torn down, which a launcher that kills the other ranks would not wait for
    assert output.index("a collective failed") < output.index("Traceback")


@pytest.mark.parametrize("rank", by_default([], [0, 1]))
def test_a_lost_rank_ends_a_launch_of_lightnings(launch, qwen3_dir, rank):
    """Which of the two is quicker is open: the other rank's own error, or Lightning, which looks every five seconds."""
    launch.start("-m", SCRIPT, "--model", str(qwen3_dir), "--out", str(launch.out), "--dying-rank", str(rank))
    (code,) = launch.wait()
    gone = time.monotonic()
    other = int((launch.out / "1.pid").read_text())
    while psutil.pid_exists(other) and psutil.Process(other).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < gone + END_OF_OTHERS, launch.output()
        time.sleep(0.1)
    assert code == (3 if rank == 0 else code) != 0
    assert not list(launch.out.glob("*.json")), "the run went on to its end"
    said = ("a collective failed", "Forcefully terminating all other processes")
    assert any(words in launch.output() for words in said), launch.output()


@pytest.mark.slow  # test_resume.py has the same on the shared workers
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_rank_stops_all_of_them_after_the_same_batch(launch, qwen3_dir, rank):
    """Hangs with Lightning's own handler, which broadcasts from within the signal."""
    launch.start("-m", SCRIPT, "--model", str(qwen3_dir), "--out", str(launch.out), "--terminated-rank", str(rank))
    assert launch.wait() == [143], launch.output()
    # the signal comes in the first batch, and the ranks look for it at its end
    assert [(launch.out / f"{rank}.stopped").read_text() for rank in (0, 1)] == ["SIGTERMException 1"] * 2
    assert not list(launch.out.glob("*.json")), "the run went on to its end"


class Sleeps(pl.Callback):
    """Keeps the last rank from its next collective for longer than the process-group timeout."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, index: int) -> None:
        if trainer.global_rank == 1:
            time.sleep(self.seconds)


def fit_with_timeout(model: Path, timeout_s: float, world_size: int) -> str:
    """The error of a run whose second rank is late."""
    started = time.monotonic()
    try:
        fit_sft(model, {"timeout_s": timeout_s}, world_size, callbacks=[Sleeps(timeout_s + 3)])
    except Exception as error:
        return f"{time.monotonic() - started:.1f} {type(error).__name__}: {error}"
    raise AssertionError("the late rank was waited for")


def test_process_group_timeout_names_the_phase(worker_pool, qwen3_dir):
    """Fails without `phase_deadline`, and where Megatron's groups do not get the user's timeout."""
    timeout_s = 5.0
    try:
        message = worker_pool.run(
            fit_with_timeout, qwen3_dir, timeout_s, 2, world_size=2, init_process_group=False, timeout=90.0
        )[0]
    finally:
        worker_pool.close()  # what is left of broken process groups must not meet the next test
    assert "PhaseError: rank 0 (tp 0, pp 0, cp 0, dp 0)" in message
    assert "in phase 'update' (process-group timeout 5 s)" in message
    assert "raise MegatronStrategy(timeout_s=...)" in message
