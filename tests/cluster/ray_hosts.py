"""A Ray cluster over the hosts of a test."""

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.hosts import ROOT, Cluster

PORT = 6380
START_S = 120.0
EXAMPLE = str(ROOT / "examples" / "cluster" / "ray_train.py")


def variables(out: Path) -> dict[str, str]:
    """The environment of everything that belongs to the cluster."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(out / "ray-token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_METRICS_COLLECTION": "1",
        "RAY_DEDUP_LOGS": "0",
    }


@contextmanager
def ray_cluster(hosts: Cluster, out: Path, cpus: Sequence[int] = (2, 2)) -> Iterator[dict[str, str]]:
    """Start a head on the first host and a node on each other one; yields a driver's environment.

    Args:
        hosts: Where.
        out: For logs; all hosts have it.
        cpus: That Ray may give away, by host.
    """
    out.mkdir(exist_ok=True)
    (out / "ray-token").write_text("0123456789abcdef" * 4)
    (out / "ray-token").chmod(0o600)
    head = f"{hosts.hosts[0].address}:{PORT}"
    environment = {**variables(out), "RAY_ADDRESS": head}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, host in enumerate(hosts.hosts):
            log = out / f"ray-{number}.log"
            role = (
                ["--head", "--port", str(PORT), "--include-dashboard", "false"] if number == 0 else ["--address", head]
            )
            size = ["--num-cpus", str(cpus[number]), "--object-store-memory", "80000000"]
            line = ["-m", "ray.scripts.scripts", "start", "--block", *role, "--node-ip-address", host.address, *size]
            started.append(host.python(log, *line, **variables(out)))
            deadline = time.monotonic() + START_S
            while "Ray runtime started" not in log.read_text():
                assert started[-1].poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield environment
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)
