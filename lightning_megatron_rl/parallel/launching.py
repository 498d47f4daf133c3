"""How one process of a machine starts the other ranks of a run."""

import os
import socket

from lightning.pytorch.plugins import ClusterEnvironment

from lightning_megatron_rl.compat.lightning import ScriptLauncher
from lightning_megatron_rl.parallel.leader import LEADER


class RankLauncher(ScriptLauncher):
    """Lightning's launcher, which keeps the rendezvous port reserved and ends its ranks with itself.

    Lightning looks for a free port before it starts the others, and rank 0 listens there when all have imported what
    they need. This launcher holds the port until then: it is bound, and refuses connections.
    """

    def __init__(self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._held: socket.socket | None = None

    def release_port(self) -> None:
        """Give the port back, for rank 0 to listen there at once."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def _call_children_scripts(self) -> None:
        if "MASTER_PORT" not in os.environ and self.num_nodes == 1:
            self._held = socket.socket()
            self._held.bind(("", 0))
            os.environ["MASTER_PORT"] = str(self._held.getsockname()[1])  # Lightning takes it, and would set it, too
        os.environ[LEADER] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[LEADER]
