"""Engines that Ray places: what is refused; the samples of a local engine; an engine, a host and a trainer that go."""

import json
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lightning_megatron_rl.parallel.ray_cluster import check_parts
from lightning_megatron_rl.rollout.servers import ray_engines
from lightning_megatron_rl.rollout.servers.launch import SERVER_MODULE
from lightning_megatron_rl.rollout.servers.ray_actor import PORTS, find_port
from lightning_megatron_rl.rollout.servers.ray_engines import RayEngines
from lightning_megatron_rl.rollout.servers.ray_places import DRIVER_MODULE
from tests.cluster.hosts import Cluster
from tests.cluster.ray_engines_script import NUM_RESPONSES, TOKENS
from tests.cluster.ray_hosts import end_nodes, needs_ray, ray_cluster, start_nodes
from tests.cluster.runs import ClusterRun
from tests.cluster.test_grpo import same_as_a_local_engines, start
from tests.modules.test_streaming import write_rows

EXACT = 1e-5  # nats, fp32: sums in another order
GONE_S = 30.0  # for what a killed trainer has left
HEAD_GONE_S = 120.0  # for Ray's nodes to give a lost head up, which takes them 60 s
ACTOR = "EngineActor"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_engines": 0}, "engine.num_engines=0 must be at least 1"),
        ({"num_engines": 1.5}, "engine.num_engines=1.5 must be a whole number"),
        ({"tensor_parallel_size": 0}, "engine.tensor_parallel_size=0 must be at least 1"),
        ({"num_cpus": 0}, "engine.num_cpus=0 must be"),
        ({"max_model_len": 1}, "engine.max_model_len=1 must be"),
        ({"device": "auto"}, "engine.device='auto': choose one of cuda, cpu"),
        ({"resources": {"GPU": 1}}, "engine.resources has GPU: set num_cpus, or tensor_parallel_size"),
        ({"resources": {"engines": 0}}, "engine.resources: 0 of 'engines' must be above 0"),
        ({"vllm_args": {"seed": 3}}, "set the engine's seed"),
        ({"start_timeout_s": 0}, "engine.start_timeout_s=0 must be above 0"),
        ({"device": "cpu", "weights_over": "nccl"}, "engine.weights_over='nccl': engine.device is 'cpu'. NCCL"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        RayEngines(**settings)


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, {"CPU": 1, "GPU": 1}),
        ({"tensor_parallel_size": 4}, {"CPU": 4, "GPU": 4}),
        ({"device": "cpu", "tensor_parallel_size": 2, "num_threads": 3}, {"CPU": 6}),
        ({"num_cpus": 8, "resources": {"engines": 1}}, {"CPU": 8, "GPU": 1, "engines": 1}),
    ],
)
def test_an_engine_asks_for_what_its_processes_need(settings, asked):
    assert RayEngines(**settings).asked == asked


def test_several_engines_may_be_on_one_node():
    check_parts({"CPU": 2, "GPU": 2}, 5, [{"CPU": 64, "GPU": 8}, {"CPU": 3, "GPU": 8}])


def test_parts_of_a_cpu_fit_as_often_as_ray_counts():
    """Ray counts in ten-thousandths: 1.0 // 0.1 is 9."""
    check_parts({"CPU": 0.1}, 10, [{"CPU": 1.0}])
    with pytest.raises(ValueError, match="there is room for 9"):
        check_parts({"CPU": 0.1}, 10, [{"CPU": 0.99}])


@pytest.mark.parametrize(
    ("gpus", "count", "words"),
    [
        (2, 6, r"6 x \(2 CPU, 2 GPU\), each on one node, are asked of the Ray cluster, and there is room for 5"),
        (16, 1, r"1 x \(2 CPU, 16 GPU\), each on one node, .* and no node has that much"),
    ],
)
def test_a_cluster_without_room_is_refused(gpus, count, words):
    with pytest.raises(ValueError, match=words) as error:
        check_parts({"CPU": 2, "GPU": gpus}, count, [{"CPU": 64, "GPU": 8}, {"CPU": 3, "GPU": 8}])
    assert "Its 2 node(s) have: 64 CPU, 8 GPU; 3 CPU, 8 GPU" in str(error.value)


def test_ray_that_is_missing_is_named(monkeypatch, qwen3_dir):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RuntimeError, match=re.escape("pip install 'lightning-megatron-rl[ray]'")):
        RayEngines().start(qwen3_dir)


def test_fewer_engines_than_replicas_are_refused(monkeypatch, qwen3_dir):
    monkeypatch.setattr(ray_engines, "find_spec", lambda name: True)
    monkeypatch.setattr(ray_engines, "replica_share", lambda: (0, 4))
    with pytest.raises(ValueError, match=r"engine.num_engines=2 for 4 replicas of the model.*Ask for 4"):
        RayEngines(2).start(qwen3_dir)


def test_ports_are_below_those_of_outgoing_connections():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert find_port("127.0.0.1") in PORTS
    assert max(PORTS) < first


def command_lines(words: str) -> dict[int, str]:
    """Processes on all hosts with these words in their command line."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if words in line and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = line
    return found


def wait_for(path: Path, run: ClusterRun, seconds: float = 480.0) -> float:
    """Wait for a file; returns the time at which it was there."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, run.output()
        assert run.processes[-1].poll() is None, run.output()
        time.sleep(0.05)
    return time.time()


def start_script(run: ClusterRun, model: Path, environment: dict[str, str], *more: str, host: int = 0) -> None:
    run.out.mkdir()
    arguments = ["-m", "tests.cluster.ray_engines_script", "--model", str(model), "--out", str(run.out), *more]
    run.processes.append(run.hosts.hosts[host].python(run.out / "0.log", *arguments, **environment))


def goes_on(run: ClusterRun, lost_at: float, *versions: list[int]) -> None:
    """An engine was lost, no response was, and it samples again with new weights.

    Args:
        run: The trainer's.
        lost_at: When.
        versions: Of the weights that the responses may be drawn with.
    """
    wait_for(run.out / "complete.json", run)
    told = json.loads((run.out / "complete.json").read_text())
    print(f"noticed after {told['noticed'] - lost_at:.1f} s, all responses complete after {told['at'] - lost_at:.1f} s")
    assert told["lengths"] == [TOKENS] * NUM_RESPONSES
    assert max(told["errors"]) < EXACT
    assert told["versions"] in versions
    wait_for(run.out / "again.json", run)
    again = json.loads((run.out / "again.json").read_text())
    print(f"placed and loaded again after {again['back'] - lost_at:.1f} s")
    assert set(again["states"]) == {"ready"}
    assert again["moved"] == 1
    assert again["error"] < EXACT


def nothing_is_left(words: str, seconds: float = GONE_S) -> None:
    deadline = time.monotonic() + seconds
    while left := command_lines(words):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.deadline(1200)
def test_a_killed_engine_is_placed_again_and_nothing_is_left_of_a_killed_trainer(make_hosts, tmp_path, qwen3_dir):
    needs_ray()
    hosts = make_hosts(3)
    with ray_cluster(hosts, tmp_path / "ray", cpus=(0, 2, 2)) as environment:
        big = ClusterRun(hosts, tmp_path / "big")
        start_script(big, qwen3_dir, environment, "--engines", "5")
        assert big.wait() == [1], big.output()
        assert "5 x (1 CPU), each on one node, are asked of the Ray cluster, and there is room for 4" in big.output()
        bad = ClusterRun(hosts, tmp_path / "bad")
        start_script(bad, qwen3_dir, environment, "--vllm-args", '{"max_num_batched_tokens": 8}')
        assert bad.wait() == [1], bad.output()
        why = "engine.vllm_args: max_num_batched_tokens=8 on a CPU"
        assert re.search(rf"engine \d on Ray has ended: it cannot start on node-[12]: {why}", bad.output())
        run = ClusterRun(hosts, tmp_path / "run")
        start_script(run, qwen3_dir, environment)
        wait_for(run.out / "under_way", run)
        servers = command_lines(SERVER_MODULE)
        assert len(servers) == 2
        psutil.Process(min(servers)).kill()
        goes_on(run, time.time(), [1])
        token = (run.out / "token").read_text()
        assert len(token) > 40
        assert not command_lines(token)
        logs = [*tmp_path.rglob("*.log"), *Path(f"/proc/{hosts.hosts[1].pid}/root/tmp/ray").rglob("*.*")]
        assert len(logs) > 10
        assert not [log for log in logs if log.is_file() and token.encode() in log.read_bytes()]
        assert command_lines(ACTOR)
        (trainer,) = command_lines(f"ray_engines_script --model {qwen3_dir} --out {run.out}").keys() - {
            run.processes[0].pid
        }
        psutil.Process(trainer).kill()
        nothing_is_left(SERVER_MODULE)
        nothing_is_left(ACTOR)


@pytest.mark.slow
@pytest.mark.deadline(1200)
def test_responses_of_the_only_engine_wait_for_it(make_hosts, tmp_path, qwen3_dir):
    """Here the process that talks to Ray is lost, and all engines with it: another one places them."""
    needs_ray()
    hosts = make_hosts(1)
    with ray_cluster(hosts, tmp_path / "ray", cpus=(1,)) as environment:
        run = ClusterRun(hosts, tmp_path / "run")
        start_script(run, qwen3_dir, environment, "--engines", "1")
        wait_for(run.out / "under_way", run)
        (driver,) = command_lines(DRIVER_MODULE)
        psutil.Process(driver).kill()
        goes_on(run, time.time(), [1, 2])


@pytest.mark.slow
@pytest.mark.deadline(1200)
def test_engines_go_on_when_a_lost_head_of_ray_is_back(make_hosts, tmp_path, qwen3_dir):
    """Ray's nodes end some time after their head, and engines with them; the run waits for a new cluster."""
    needs_ray()
    hosts, cpus = make_hosts(3), (0, 0, 1)
    head = hosts.hosts[0]
    with ray_cluster(hosts, tmp_path / "ray", cpus) as environment:
        run = ClusterRun(hosts, tmp_path / "run")
        start_script(run, qwen3_dir, environment, "--engines", "1", host=1)
        wait_for(run.out / "under_way", run)
        lost_at = time.time()
        for process in head.processes():
            process.kill()
        wait_for(run.out / "noticed", run)
        print(f"noticed after {time.time() - lost_at:.1f} s")
        nothing_is_left("raylet/raylet", HEAD_GONE_S)
        nothing_is_left(SERVER_MODULE)
        again = start_nodes(hosts, tmp_path / "ray", cpus)
        print(f"the cluster was back after {time.time() - lost_at:.1f} s")
        try:
            goes_on(run, lost_at, [1], [1, 2])  # by how many were complete within the minute that Ray needs
        finally:
            for process in run.processes:
                process.kill()
            end_nodes(again)


@pytest.mark.slow
@pytest.mark.deadline(1200)
def test_engines_of_a_host_that_is_gone_are_placed_on_another(make_hosts, tmp_path, qwen3_dir):
    needs_ray()
    hosts = make_hosts(3)
    with ray_cluster(hosts, tmp_path / "ray", cpus=(0, 2, 2)) as environment:
        run = ClusterRun(hosts, tmp_path / "run")
        start_script(run, qwen3_dir, environment)
        wait_for(run.out / "under_way", run)
        hosts.cut(hosts.hosts[2])  # without a word
        hosts.hosts[2].kill()
        goes_on(run, time.time(), [1])


@pytest.mark.slow
@pytest.mark.deadline(1200)
@pytest.mark.parametrize("staleness", [0, 1])
def test_engines_on_two_other_hosts_give_the_run_of_a_local_engine(make_hosts, tmp_path, qwen3_dir, staleness):
    needs_ray()
    hosts, rows = make_hosts(3), write_rows(tmp_path / "rows.jsonl", 16)
    trainer = Cluster(hosts.hosts[:1], hosts.switch)
    more = ["--staleness", str(staleness)]
    remote = ClusterRun(trainer, tmp_path / "remote")
    with ray_cluster(hosts, tmp_path / "ray", cpus=(0, 1, 1)) as environment:
        start(remote, "torchrun", qwen3_dir, rows, "--ray-engines", "2", *more, **environment)
        assert remote.wait() == [0], remote.output()
        nothing_is_left(SERVER_MODULE)
    local = ClusterRun(trainer, tmp_path / "local")
    start(local, "torchrun", qwen3_dir, rows, *more)
    assert local.wait() == [0], local.output()
    same_as_a_local_engines(remote, local, staleness)
