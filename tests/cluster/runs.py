"""Runs of a script on several hosts, started as torchrun and SLURM do."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Cluster
from tests.strategy.test_megatron import RELATIVE

DEADLINE = 400.0  # seconds for a run of some steps on a busy machine; about 25 on an idle one
PORT = 29500


class ClusterRun:
    """One process per host of a script.

    Args:
        hosts: Where.
        out: For logs; all hosts have it.
    """

    def __init__(self, hosts: Cluster, out: Path) -> None:
        self.hosts = hosts
        self.out = out
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, launcher: str, *arguments: str, ranks: list[int] | None = None, restarts: int = 0, **environment: str
    ) -> None:
        """Start `python arguments` on each host, or as some of the ranks only.

        Args:
            launcher: "torchrun" or "slurm".
            arguments: Of Python.
            ranks: Those that are started; None: all.
            restarts: By torchrun, of ranks that fail.
            environment: Variables of all processes.
        """
        hosts = self.hosts.hosts
        for rank in range(len(hosts)) if ranks is None else ranks:
            self.out.mkdir(exist_ok=True)
            log = self.out / f"{rank}.log"
            if launcher == "torchrun":
                line = ["-m", "torch.distributed.run", "--nnodes", str(len(hosts)), "--nproc-per-node", "1"]
                line += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address}:{PORT}", "--rdzv-id", "test"]
                line += ["--local-addr", hosts[rank].address, "--max-restarts", str(restarts)]
                self.processes.append(hosts[rank].python(log, *line, *arguments, **environment))
            else:
                variables = slurm_variables(rank, len(hosts)) | environment
                self.processes.append(hosts[rank].python(log, *arguments, **variables))

    def wait(self) -> list[int]:
        """Exit codes."""
        deadline = time.monotonic() + DEADLINE
        return [process.wait(max(1.0, deadline - time.monotonic())) for process in self.processes]

    def wait_for(self, path: str, at_least: int = 0) -> None:
        """Wait until a file below `out` has a number of at least so much."""
        deadline = time.monotonic() + DEADLINE
        file = self.out / path
        while not file.exists() or int(file.read_text() or -1) < at_least:
            assert time.monotonic() < deadline, self.output()
            assert all(process.poll() is None for process in self.processes), self.output()
            time.sleep(0.1)

    def output(self) -> str:
        """All that was printed."""
        logs = sorted(self.out.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text()}" for log in logs)

    def results(self) -> list[Any]:
        """What each rank has written."""
        return [json.loads((self.out / f"{rank}.json").read_text()) for rank in range(len(self.hosts.hosts))]


def went_on(run: ClusterRun, expected: list[dict[str, float]]) -> None:
    """A run that was started again lost no step and repeated none: its losses are the last of those expected."""
    for steps in run.results():
        losses = [step["policy/loss"] for step in steps]
        assert 2 <= len(losses) < len(expected), "it began anew"
        assert losses == pytest.approx([step["policy/loss"] for step in expected[-len(losses) :]], rel=RELATIVE)


def slurm_variables(rank: int, count: int) -> dict[str, str]:
    """Variables of one task of ``srun --nodes COUNT --ntasks-per-node 1``."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": str(count),
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": str(count),
        "SLURM_NODEID": str(rank),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODELIST": f"node-[0-{count - 1}]",
        "SLURM_JOB_NODELIST": f"node-[0-{count - 1}]",
    }
