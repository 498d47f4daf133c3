"""Training on nodes that Ray places: the numbers of one host; a node that goes; what a cluster does not have."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from lightning_megatron_rl.parallel import ray_cluster as places
from tests.cluster.hosts import Cluster
from tests.cluster.ray_hosts import EXAMPLE, JOBS_PORT, needs_ray, ray_cluster
from tests.cluster.runs import ClusterRun, went_on
from tests.cluster.test_grpo import equal_steps
from tests.modules.test_streaming import write_rows
from tests.strategy.test_megatron import RELATIVE
from tests.training import fit_sft, frozen_sequences

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


def same_numbers(run: ClusterRun, expected: list[dict[str, float]]) -> None:
    for steps in run.results():
        for mine, theirs in zip(steps, expected, strict=True):
            for key, value in mine.items():
                assert value == pytest.approx(theirs[key], rel=RELATIVE), key


def sft_on_two_hosts(model: Path, out: Path, *of_ray_train: str) -> list[str]:
    """Arguments of ray_train.py, from a directory that is made for what the run writes."""
    out.mkdir()
    script = ["--model", str(model), "--devices", "1", "--num-nodes", "2", "--out", str(out)]
    return ["--num-nodes", "2", "--accelerator", "cpu", *of_ray_train, *SFT, *script]


@pytest.mark.slow
@pytest.mark.deadline(600)
def test_a_job_that_is_submitted_trains_on_both_hosts(make_hosts, tmp_path, worker_pool, qwen3_dir):
    """From a host's command line, as the example says; Ray takes the working directory along."""
    needs_ray()
    expected = worker_pool.run(fit_sft, qwen3_dir, {}, 2, world_size=2, init_process_group=False)[0].steps
    hosts, work = make_hosts(2), tmp_path / "work"
    (work / "examples" / "cluster").mkdir(parents=True)
    shutil.copy(EXAMPLE, work / "examples" / "cluster")
    run = ClusterRun(hosts, tmp_path / "out")
    arguments = sft_on_two_hosts(qwen3_dir, run.out)
    with ray_cluster(hosts, tmp_path / "ray", takes_jobs=True) as environment:
        line = ["-m", "ray.scripts.scripts", "job", "submit", "--address"]
        line += [f"http://{hosts.hosts[0].address}:{JOBS_PORT}", "--working-dir", str(work), "--", "python"]
        line += ["examples/cluster/ray_train.py", *arguments]
        run.processes.append(hosts.hosts[1].python(run.out / "submit.log", *line, **environment))
        assert run.wait() == [0], run.output()
    assert "succeeded" in run.output()
    same_numbers(run, expected)


@pytest.mark.slow
@pytest.mark.deadline(600)
def test_a_run_whose_rank_is_killed_is_started_again(make_hosts, tmp_path, worker_pool, qwen3_dir):
    needs_ray()
    options = {"steps": 6, "sequences": frozen_sequences(4)}
    expected = worker_pool.run(fit_sft, qwen3_dir, {}, 2, world_size=2, init_process_group=False, **options)[0].steps
    hosts = make_hosts(2)
    run = ClusterRun(hosts, tmp_path / "out")
    arguments = sft_on_two_hosts(qwen3_dir, run.out, "--max-restarts", "1")
    with ray_cluster(hosts, tmp_path / "ray") as environment:
        line = [EXAMPLE, *arguments, "--checkpoints", str(tmp_path / "checkpoints"), "--resume"]
        line += [
            "--steps",
            "6",
            "--rows",
            "4",
            "--dying-rank",
            "1",
            "--dying-step",
            "4",
            "--dies-once",
            "--step-s",
            "1",
        ]
        run.processes.append(hosts.hosts[0].python(run.out / "driver.log", *line, **environment))
        assert run.wait() == [0], run.output()
    assert "restart 1 of 1" in run.output()
    went_on(run, expected)


@pytest.mark.slow
@pytest.mark.deadline(600)
def test_two_hosts_by_ray_give_the_run_of_one(make_hosts, tmp_path, worker_pool, qwen3_dir):
    """SFT and GRPO, with an engine on each host; and a cluster that is too small is refused at once."""
    needs_ray()
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
    same_numbers(runs["sft"], expected)
    for rank in (0, 1):
        mine, theirs = (json.loads((run.out / f"{rank}.json").read_text()) for run in (runs["grpo"], one))
        assert mine["tokens"] == theirs["tokens"]
        equal_steps(mine, theirs)
