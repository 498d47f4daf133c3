"""Training on nodes that Ray places: the numbers of one host; a node that goes; what a cluster does not have."""

import importlib.util
import json
import re
import sys

import pytest

from lightning_megatron_rl.parallel import ray_cluster as places
from tests.cluster.hosts import Cluster
from tests.cluster.ray_hosts import EXAMPLE, ray_cluster
from tests.cluster.runs import ClusterRun
from tests.cluster.test_grpo import equal_steps
from tests.modules.test_streaming import write_rows
from tests.strategy.test_megatron import RELATIVE
from tests.training import fit_sft

SFT = ("--module", "tests.strategy.launch_script", "--")
GRPO = ("--module", "tests.cluster.grpo_script", "--")


def test_a_cluster_that_has_it_is_taken():
    places.check_resources({"CPU": 2, "GPU": 8}, 2, [{"CPU": 4, "GPU": 8}, {"CPU": 2, "GPU": 8, "memory": 1}])


@pytest.mark.parametrize("nodes", [[{"CPU": 8.0, "GPU": 8.0}], [{"CPU": 8.0, "GPU": 8.0}, {"CPU": 8.0, "GPU": 4.0}]])
def test_a_cluster_without_the_resources_is_refused(nodes):
    with pytest.raises(ValueError, match=r"has 1 node\(s\) with 4 CPU, 8 GPU, and 2 are asked for") as error:
        places.check_resources({"CPU": 4, "GPU": 8}, 2, nodes)
    assert f"Its {len(nodes)} node(s) have: 8 CPU, 8 GPU" in str(error.value)


def test_ray_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RuntimeError, match=re.escape("pip install 'lightning-megatron-rl[ray]'")):
        places.connect()


@pytest.mark.slow
@pytest.mark.deadline(600)
def test_two_hosts_by_ray_give_the_run_of_one(make_hosts, tmp_path, worker_pool, qwen3_dir):
    """SFT and GRPO, with an engine on each host; and a cluster that is too small is refused at once."""
    if importlib.util.find_spec("ray") is None:  # importing it changes the environment
        pytest.skip("Ray is not installed: the extra ray")
    hosts = make_hosts(2)
    head, rows = hosts.hosts[0], write_rows(tmp_path / "rows.jsonl", 16)
    grpo = ["--model", str(qwen3_dir), "--rows", str(rows)]
    one = ClusterRun(Cluster(hosts.hosts[:1], hosts.switch), tmp_path / "one")
    one.out.mkdir()
    arguments = ["-m", "tests.cluster.grpo_script", *grpo, "--devices", "2", "--out", str(one.out)]
    one.processes.append(head.python(one.out / "0.log", *arguments))
    assert one.wait() == [0], one.output()
    with ray_cluster(hosts, tmp_path / "ray") as environment:
        runs = {}
        for name, count, script in (("big", "3", SFT), ("sft", "2", SFT), ("grpo", "2", GRPO)):
            run = runs[name] = ClusterRun(hosts, tmp_path / name)
            run.out.mkdir()
            model = grpo if name == "grpo" else ["--model", str(qwen3_dir), "--devices", "1"]
            line = [EXAMPLE, "--num-nodes", count, "--accelerator", "cpu", *script, *model, "--num-nodes", "2"]
            run.processes.append(head.python(run.out / "driver.log", *line, "--out", str(run.out), **environment))
            assert run.wait() == [2 if name == "big" else 0], run.output()
    assert "the Ray cluster has 2 node(s) with 1 CPU, and 3 are asked for" in runs["big"].output()
    expected = worker_pool.run(fit_sft, qwen3_dir, {}, 2, world_size=2, init_process_group=False)[0].steps
    for steps in runs["sft"].results():
        for mine, theirs in zip(steps, expected, strict=True):
            for key, value in mine.items():
                assert value == pytest.approx(theirs[key], rel=RELATIVE), key
    for rank in (0, 1):
        mine, theirs = (json.loads((run.out / f"{rank}.json").read_text()) for run in (runs["grpo"], one))
        assert mine["tokens"] == theirs["tokens"]
        equal_steps(mine, theirs)
