"""The actor of one engine: it runs vLLM's server on the node where Ray has placed it."""

import os
import random
import socket
import subprocess
from contextlib import suppress
from typing import Any

from lightning_megatron_rl.rollout.servers.launch import Server, server_settings
from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine

# below those that systems give to outgoing connections: none of these takes it before the server does
PORTS = range(20000, 30000)
TAIL_BYTES = 4000
END_S = 10.0


class EngineActor:
    """One server; its methods are called over Ray, one at a time. It ends with the actor, however that ends."""

    def __init__(self) -> None:
        self._server: Server | None = None

    def start(self, model: str, settings: dict[str, Any], digest: str) -> tuple[str, str]:
        """Start the server and return its address and this host's name, while it loads.

        Args:
            model: Hugging Face directory, under the same path on all nodes.
            settings: Of `VLLMEngine`.
            digest: Of the server's token.

        Raises:
            RuntimeError: It cannot start on this host, which is named: no such model, another vLLM than the host needs.
        """
        import ray

        address = ray.util.get_node_ip_address()
        port = find_port(address)
        try:
            arguments, environment = server_settings(model, VLLMEngine(**settings), (address, port), digest, os.environ)
        except (ValueError, RuntimeError, OSError) as error:
            raise RuntimeError(f"it cannot start on {socket.gethostname()}: {error}") from error
        self._server = Server(arguments, environment, stderr=subprocess.STDOUT)
        return f"http://{address}:{port}", socket.gethostname()

    def look(self) -> tuple[str, str] | None:
        """Return None while the server runs, then how it has ended and the last of its output."""
        assert self._server is not None, "start() was called"
        if self._server.is_running:
            return None
        code = self._server.end()
        return f"its server on {socket.gethostname()} has ended with {code}", _own_output()

    def stop(self) -> None:
        """End the server in good order."""
        if self._server is not None:
            self._server.ask_to_end()
            self._server.wait(END_S)
            self._server.end()


def find_port(address: str) -> int:
    """Return a port that is free at an address of this host.

    Raises:
        RuntimeError: There is none.
    """
    for port in random.sample(PORTS, 100):
        with suppress(OSError), socket.create_server((address, port)):
            return port
    raise RuntimeError(f"no free port among 100 of {PORTS.start} to {PORTS.stop - 1} at {address}")


def _own_output() -> str:
    """What was printed last, of the file to which Ray sends it."""
    try:
        with open("/proc/self/fd/1", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return "(not in a file)"
