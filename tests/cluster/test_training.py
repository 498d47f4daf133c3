"""Training on two hosts: the numbers of one host, whoever starts it, and a checkpoint that moves between them."""

import os
import signal
import sys

import pytest

from tests.cluster.hosts import Cluster
from tests.cluster.runs import ClusterRun, went_on
from tests.selection import by_default
from tests.strategy.test_megatron import RELATIVE
from tests.training import fit_sft, frozen_sequences

SCRIPT = ("-m", "tests.strategy.launch_script", "--devices", "1", "--num-nodes", "2")


@pytest.fixture(scope="module")
def expected(worker_pool, qwen3_dir) -> list[dict[str, float]]:
    """The same run on two ranks of one host."""
    return worker_pool.run(fit_sft, qwen3_dir, {}, 2, world_size=2, init_process_group=False)[0].steps


@pytest.mark.parametrize("launcher", by_default(["slurm"], ["slurm", "torchrun"]))
def test_two_hosts_give_the_run_of_one(make_hosts, tmp_path, qwen3_dir, expected, launcher):
    run = ClusterRun(make_hosts(2), tmp_path / "out")
    run.start(launcher, *SCRIPT, "--model", str(qwen3_dir), "--out", str(run.out))
    assert run.wait() == [0, 0], run.output()
    for steps in run.results():
        assert len(steps) == len(expected)
        for mine, theirs in zip(steps, expected, strict=True):
            for name, value in mine.items():
                assert value == pytest.approx(theirs[name], rel=RELATIVE), name
    output = run.output()
    assert "hosts: ranks, and the ranks of their groups" in output
    assert "node-0" in output
    assert "node-1" in output


@pytest.mark.slow
def test_names_that_do_not_resolve_need_no_setting(make_hosts, tmp_path, qwen3_dir):
    """gloo takes what a host's own name resolves to, the loopback interface if nothing, unless it is told better."""
    hosts = make_hosts(2, names_resolve=False)
    run = ClusterRun(hosts, tmp_path / "out")
    address = hosts.hosts[0].address
    run.start("slurm", *SCRIPT, "--model", str(qwen3_dir), "--out", str(run.out), MASTER_ADDR=address)
    assert run.wait() == [0, 0], run.output()


@pytest.mark.slow
def test_a_run_moves_from_two_hosts_to_one_and_back(make_hosts, tmp_path, worker_pool, qwen3_dir):
    """Three steps on two hosts, one more on one host, two more on two: the losses of six on one.

    Each epoch is one batch: the plain loader of the script has no position to resume from.
    """
    options = {"steps": 6, "sequences": frozen_sequences(4)}
    expected = worker_pool.run(fit_sft, qwen3_dir, {}, 2, world_size=2, init_process_group=False, **options)[0].steps
    hosts = make_hosts(2)
    checkpoints = tmp_path / "checkpoints"
    script = ["--model", str(qwen3_dir), "--checkpoints", str(checkpoints)]
    losses = []
    for number, (count, steps) in enumerate(((2, 3), (1, 4), (2, 6))):
        some = Cluster(hosts.hosts[:count], hosts.switch)
        run = ClusterRun(some, tmp_path / f"out-{number}")
        own = ["--num-nodes", str(count), "--steps", str(steps), "--out", str(run.out), "--rows", "4"]
        resume = ["--resume"] if number else []
        run.start("slurm", "-m", "tests.strategy.launch_script", "--devices", "1", *script, *own, *resume)
        assert run.wait() == [0] * count, run.output()
        losses += [step["policy/loss"] for step in run.results()[0]]
    assert losses == pytest.approx([step["policy/loss"] for step in expected], rel=RELATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("dying_rank", [0, 1])
def test_what_torchrun_starts_again_goes_on_from_last(make_hosts, tmp_path, worker_pool, qwen3_dir, dying_rank):
    """A rank is killed in the fifth step; no batch is lost or repeated: the losses are those of a run without that."""
    options = {"steps": 6, "sequences": frozen_sequences(4)}
    expected = worker_pool.run(fit_sft, qwen3_dir, {}, 2, world_size=2, init_process_group=False, **options)[0].steps
    run = ClusterRun(make_hosts(2), tmp_path / "out")
    script = [*SCRIPT, "--model", str(qwen3_dir), "--checkpoints", str(tmp_path / "checkpoints"), "--resume"]
    script += ["--steps", "6", "--rows", "4", "--dying-rank", str(dying_rank), "--dying-step", "4", "--dies-once"]
    run.start("torchrun", *script, "--step-s", "1", "--out", str(run.out), restarts=1)
    assert run.wait() == [0, 0], run.output()
    went_on(run, expected)


@pytest.mark.slow
def test_a_job_that_slurm_queues_again_goes_on_where_it_stopped(make_hosts, tmp_path, worker_pool, qwen3_dir):
    """SLURM tells all ranks that the job's time is over. There is no SLURM here: what it is asked is written down."""
    options = {"steps": 6, "sequences": frozen_sequences(4)}
    expected = worker_pool.run(fit_sft, qwen3_dir, {}, 2, world_size=2, init_process_group=False, **options)[0].steps
    asked, command = tmp_path / "asked", tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    command.chmod(0o755)
    path = f"{command.parent}:{os.environ['PATH']}"
    hosts = make_hosts(2)
    script = [*SCRIPT, "--model", str(qwen3_dir), "--checkpoints", str(tmp_path / "checkpoints"), "--root"]
    script += [str(tmp_path), "--steps", "6", "--rows", "4", "--step-s", "1", "--out"]
    run = ClusterRun(hosts, tmp_path / "out")
    run.start("slurm", *script, str(run.out), PATH=path)
    for rank in (0, 1):
        run.wait_for(f"{rank}.step", 2)
    ranks = [process for host in hosts.hosts for process in host.processes() if process.cmdline()[0] == sys.executable]
    assert len(ranks) == 2
    for process in ranks:
        process.send_signal(signal.SIGUSR1)
    assert run.wait() == [128 + signal.SIGUSR1, 0], run.output()
    assert asked.read_text() == "requeue 4711\n"
    again = ClusterRun(hosts, tmp_path / "again")
    again.start("slurm", *script, str(again.out), PATH=path, SLURM_RESTART_COUNT="1")
    assert again.wait() == [0, 0], again.output()
    went_on(again, expected)
