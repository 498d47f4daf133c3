"""GRPO over hosts: an engine on each, or servers on hosts of their own; the run of one host."""

import json
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster
from tests.cluster.runs import ClusterRun
from tests.modules.test_streaming import write_rows
from tests.rollout.server_process import TOKEN, serve_command
from tests.strategy.test_megatron import RELATIVE

pytestmark = [pytest.mark.slow, pytest.mark.deadline(1200)]

EXACT = 1e-5  # nats, fp32: sums in another order
PORT = 8000


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", 16)


def start(run: ClusterRun, launcher: str, model: Path, rows: Path, *more: str, **environment: str) -> None:
    arguments = ["--model", str(model), "--rows", str(rows), "--out", str(run.out), *more]
    run.start(launcher, "-m", "tests.cluster.grpo_script", *arguments, LIGHTNING_MEGATRON_RL_TOKEN=TOKEN, **environment)


def equal_steps(mine: dict, theirs: dict) -> None:
    assert len(mine["steps"]) == len(theirs["steps"]) > 0
    for step, expected in zip(mine["steps"], theirs["steps"], strict=True):
        for name in ("policy/loss", "policy/grad_norm", "reward/mean"):
            assert step[name] == pytest.approx(expected[name], rel=RELATIVE, abs=1e-7), name
        assert step["mismatch/abs_logp_diff"] < EXACT


def same_as_a_local_engines(remote: ClusterRun, local: ClusterRun, staleness: int) -> None:
    """Hold a run whose engines are on other hosts to one whose engine is on its own."""
    (mine,), (theirs,) = remote.results(), local.results()
    assert mine["restarts"] == 0
    first, *others = mine["links"]
    assert first == 0  # a first push goes by buckets
    assert all(share > 0 for share in others)
    assert theirs["links"] == [None] * len(mine["links"])
    if staleness == 0:
        assert mine["tokens"] == theirs["tokens"]
        equal_steps(mine, theirs)
    else:  # when an update comes is a matter of time
        assert [len(step) for step in mine["tokens"]] == [len(step) for step in theirs["tokens"]] == [16] * 4
        assert all(step["mismatch/abs_logp_diff"] < 0.5 for step in mine["steps"])


def test_an_engine_on_each_of_two_hosts_gives_the_run_of_one(make_hosts, tmp_path, qwen3_dir, rows):
    hosts = make_hosts(2)
    one = ClusterRun(Cluster(hosts.hosts[:1], hosts.switch), tmp_path / "one")
    one.out.mkdir()
    arguments = ["--model", str(qwen3_dir), "--rows", str(rows), "--out", str(one.out), "--devices", "2"]
    one.processes.append(hosts.hosts[0].python(one.out / "0.log", "-m", "tests.cluster.grpo_script", *arguments))
    assert one.wait() == [0], one.output()
    two = ClusterRun(hosts, tmp_path / "two")
    start(two, "slurm", qwen3_dir, rows, "--num-nodes", "2")
    assert two.wait() == [0, 0], two.output()
    for rank in (0, 1):
        mine, theirs = (json.loads((run.out / f"{rank}.json").read_text()) for run in (two, one))
        assert mine["tokens"] == theirs["tokens"]
        equal_steps(mine, theirs)


@pytest.mark.parametrize("staleness", [0, 1])
def test_servers_on_two_other_hosts_give_the_run_of_a_local_engine(make_hosts, tmp_path, qwen3_dir, rows, staleness):
    hosts = make_hosts(3)
    servers = []
    for host in hosts.hosts[1:]:
        line = serve_command(qwen3_dir, PORT, host.address)
        log = tmp_path / f"server-{host.name}.log"
        servers.append(host.start(log, *line, LIGHTNING_MEGATRON_RL_TOKEN=TOKEN))
    trainer = Cluster(hosts.hosts[:1], hosts.switch)
    remote = ClusterRun(trainer, tmp_path / "remote")
    urls = [f"http://{host.name}:{PORT}" for host in hosts.hosts[1:]]
    start(remote, "torchrun", qwen3_dir, rows, "--urls", *urls, "--staleness", str(staleness))
    assert remote.wait() == [0], remote.output()
    for process in servers:
        process.terminate()
    local = ClusterRun(trainer, tmp_path / "local")
    start(local, "torchrun", qwen3_dir, rows, "--staleness", str(staleness))
    assert local.wait() == [0], local.output()
    same_as_a_local_engines(remote, local, staleness)
