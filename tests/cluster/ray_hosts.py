"""A Ray cluster over the hosts of a test."""

import importlib.util
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.hosts import ROOT, Cluster

PORT = 6380
JOBS_PORT = 8265  # where jobs are submitted
START_S = 300.0  # on a busy machine
TRIES = 4  # Ray gives up after 30 s, which a busy machine may need
EXAMPLE = str(ROOT / "examples" / "cluster" / "ray_train.py")


def needs_ray() -> None:
    if importlib.util.find_spec("ray") is None:  # importing it changes the environment
        pytest.skip("Ray is not installed: the extra ray")


def variables(out: Path) -> dict[str, str]:
    """The environment of everything that belongs to the cluster."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(out / "ray-token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_METRICS_COLLECTION": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_worker_niceness": "0",  # Ray's is 15, behind all else on a busy machine
    }


def has_started(process: "subprocess.Popen[bytes]", log: Path) -> bool:
    """Wait for a node of Ray; returns False if it has given up."""
    deadline = time.monotonic() + START_S
    while "Ray runtime started" not in log.read_text():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return True


def start_nodes(
    hosts: Cluster, out: Path, cpus: Sequence[int], *, takes_jobs: bool = False
) -> "list[subprocess.Popen[bytes]]":
    """Start a head on the first host and a node on each other one; see `ray_cluster`."""
    head = f"{hosts.hosts[0].address}:{PORT}"
    first = ["--head", "--port", str(PORT), "--include-dashboard", str(takes_jobs).lower()]
    first += ["--dashboard-host", hosts.hosts[0].address, "--dashboard-port", str(JOBS_PORT)] if takes_jobs else []
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, host in enumerate(hosts.hosts):
            log = out / f"ray-{number}.log"
            role = first if number == 0 else ["--address", head]
            size = ["--num-cpus", str(cpus[number]), "--object-store-memory", "80000000"]
            line = ["-m", "ray.scripts.scripts", "start", "--block", *role, "--node-ip-address", host.address, *size]
            for attempt in range(TRIES):
                started.append(host.python(log, *line, **variables(out)))
                if has_started(started[-1], log):
                    break
                assert attempt < TRIES - 1, log.read_text()
    except BaseException:
        end_nodes(started)
        raise
    return started


def end_nodes(started: "list[subprocess.Popen[bytes]]") -> None:
    for process in started:
        process.terminate()
    for process in started:
        process.wait(60)


@contextmanager
def ray_cluster(
    hosts: Cluster, out: Path, cpus: Sequence[int] = (2, 2), *, takes_jobs: bool = False
) -> Iterator[dict[str, str]]:
    """Start a head on the first host and a node on each other one; yields a driver's environment.

    Args:
        hosts: Where.
        out: For logs; all hosts have it.
        cpus: That Ray may give away, by host.
        takes_jobs: Whether `ray job submit` finds somebody on the first host.
    """
    out.mkdir(exist_ok=True)
    (out / "ray-token").write_text("0123456789abcdef" * 4)
    (out / "ray-token").chmod(0o600)
    started = start_nodes(hosts, out, cpus, takes_jobs=takes_jobs)
    try:
        yield {**variables(out), "RAY_ADDRESS": f"{hosts.hosts[0].address}:{PORT}"}
    finally:
        end_nodes(started)
