"""Two hosts, of which one goes: every rank that is left ends within 30 s, and names host and rank."""

import json
import time

import pytest

from tests.cluster.hosts import ROOT
from tests.cluster.runs import ClusterRun

pytestmark = pytest.mark.slow

NOTICED = 30.0  # seconds; 16 of the kernels' probes and 5 for a rank's own error, by default
SCRIPT = (
    "-m",
    "tests.strategy.launch_script",
    "--devices",
    "1",
    "--num-nodes",
    "2",
    "--steps",
    "400",
    "--rows",
    "1600",
)


@pytest.fixture
def training(make_hosts, tmp_path, qwen3_dir):
    """A run in its third step."""
    run = ClusterRun(make_hosts(2), tmp_path / "out")
    run.start("slurm", *SCRIPT, "--step-s", "0.2", "--model", str(qwen3_dir), "--out", str(run.out))
    for rank in (0, 1):
        run.wait_for(f"{rank}.step", 3)
    return run


def ends(run: ClusterRun, rank: int, since: float) -> tuple[float, str]:
    """Seconds until a rank has ended with an error, and what it said."""
    log = run.out / f"{rank}.log"
    while run.processes[rank].poll() is None:
        assert time.monotonic() - since < NOTICED, log.read_text()
        time.sleep(0.05)
    seconds, text = time.monotonic() - since, log.read_text()
    assert run.processes[rank].returncode != 0, text
    print(f"rank {rank} ended after {seconds:.1f} s")
    return seconds, text


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_host(training, lost):
    """Its kernel still closes the connections."""
    began = time.monotonic()
    training.hosts.hosts[lost].kill()
    _, said = ends(training, 1 - lost, began)
    assert f"rank {lost} on host node-{lost} has ended or was killed" in said


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_without_power(training, lost):
    """Not a packet comes from it."""
    began = time.monotonic()
    training.hosts.cut(training.hosts.hosts[lost])
    training.hosts.hosts[lost].kill()
    _, said = ends(training, 1 - lost, began)
    assert f"rank {lost} on host node-{lost} has not answered for 16 s" in said


def test_a_cut_network_ends_both_sides(training):
    began = time.monotonic()
    training.hosts.cut(training.hosts.hosts[1])
    for rank in (0, 1):
        _, said = ends(training, rank, began)
        assert f"rank {1 - rank} on host node-{1 - rank} has not answered for 16 s" in said


def test_a_network_that_comes_back_in_time_ends_nobody(training):
    steps = training.out / "0.step"
    training.hosts.cut(training.hosts.hosts[1])
    time.sleep(6.0)
    training.hosts.join(training.hosts.hosts[1])
    training.wait_for("0.step", int(steps.read_text()) + 3)


def settings(**changes: object) -> list[str]:
    return ["--strategy", "{}", "--nodes", json.dumps(changes)]


def test_a_host_that_never_comes_is_named(make_hosts, tmp_path, qwen3_dir):
    run = ClusterRun(make_hosts(2), tmp_path / "out")
    arguments = [*SCRIPT, "--model", str(qwen3_dir), "--out", str(run.out), *settings(rendezvous_timeout_s=5)]
    run.start("slurm", *arguments, ranks=[0])
    assert run.wait() == [1], run.output()
    assert "only 1 of 2 ranks have come to rank 0 on host node-0 within 5 s" in run.output()
    assert "Missing: rank 1 (node 1, local rank 0)" in run.output()


def test_rank_zero_that_never_comes_is_named(make_hosts, tmp_path, qwen3_dir):
    run = ClusterRun(make_hosts(2), tmp_path / "out")
    arguments = [*SCRIPT, "--model", str(qwen3_dir), "--out", str(run.out), *settings(rendezvous_timeout_s=5)]
    run.start("slurm", *arguments, ranks=[1])
    assert run.wait() == [1], run.output()
    assert "rank 1 on host node-1 cannot join its run: nobody answers at node-0:" in run.output()


def test_checkpoint_directory_that_is_not_shared_is_refused(make_hosts, tmp_path, broken_model):
    """By every rank, before weights load: those of this model cannot be loaded."""
    run = ClusterRun(make_hosts(2), tmp_path / "out")
    run.start("slurm", *SCRIPT, "--model", broken_model, "--out", str(run.out), "--checkpoints", "/tmp/checkpoints")
    assert run.wait() == [1, 1], run.output()
    for rank in (0, 1):
        said = (run.out / f"{rank}.log").read_text()
        assert "the checkpoint directory of rank 0's host node-0 is not that of the others" in said
        assert "node-1: /tmp/checkpoints" in said


def test_hosts_with_other_packages_are_refused(make_hosts, tmp_path, broken_model):
    """One of them finds another version of a package first."""
    other = tmp_path / "site" / "numpy-99.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 99.0\n")
    run = ClusterRun(make_hosts(2), tmp_path / "out")
    arguments = [*SCRIPT, "--model", broken_model, "--out", str(run.out)]
    run.start("slurm", *arguments, ranks=[0])
    run.start("slurm", *arguments, ranks=[1], PYTHONPATH=f"{other.parent}:{ROOT}")
    assert run.wait() == [1, 1], run.output()
    for rank in (0, 1):
        said = (run.out / f"{rank}.log").read_text()
        assert "different versions (numpy: " in said
        assert "99.0 on node-1" in said


def test_tensor_parallel_over_hosts_is_refused_at_once(make_hosts, tmp_path, broken_model):
    run = ClusterRun(make_hosts(2), tmp_path / "out")
    layout = ["--strategy", json.dumps({"tensor_model_parallel_size": 2})]
    run.start("slurm", *SCRIPT, "--model", broken_model, "--out", str(run.out), *layout)
    assert run.wait() == [1, 1], run.output()
    assert "tensor_model_parallel_size=2 on 2 nodes of 1 rank(s) each: 1 is no multiple of 2" in run.output()
