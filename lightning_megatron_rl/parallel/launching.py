"""How one process of a machine starts the other ranks of a run."""

import atexit
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from lightning.pytorch.plugins import ClusterEnvironment
from torch import distributed as dist

from lightning_megatron_rl.compat.lightning import ScriptLauncher
from lightning_megatron_rl.parallel.leader import LEADER
from lightning_megatron_rl.parallel.rendezvous import LOOPBACK


class RankLauncher(ScriptLauncher):
    """Lightning's launcher, which keeps the rendezvous port reserved and ends its ranks with itself.

    Lightning looks for a free port before it starts the others, and rank 0 listens there when all have imported what
    they need. This launcher binds the port at once, where it refuses connections, and rank 0 listens at this very
    socket: there is no moment at which another process could take the port.
    """

    def __init__(self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._held: socket.socket | None = None

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the others and run; if this rank fails before they have met, they end with it, whatever they do.

        They may import for a while yet before they watch this rank (`leader.watch`).
        """
        try:
            return super().launch(function, *args, **kwargs)
        except BaseException:
            if not dist.is_initialized():
                # not at once: Lightning looks after its children, and would take them for the cause
                atexit.register(self.kill, signal.SIGTERM)
            raise

    def release_port(self) -> socket.socket | None:
        """Return the socket that has the port, for rank 0 to listen at; None if the user has chosen the port."""
        held, self._held = self._held, None
        return held

    def _call_children_scripts(self) -> None:
        if "MASTER_PORT" not in os.environ and self.num_nodes == 1:
            self._held = socket.socket()
            self._held.bind((LOOPBACK, 0))
            os.environ["MASTER_PORT"] = str(self._held.getsockname()[1])  # Lightning takes it, and would set it, too
        os.environ[LEADER] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[LEADER]
