"""vLLM servers of a benchmark, on GPUs behind the trainer's: started side by side, and ended whatever happens."""

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common import ROOT

from lightning_megatron_rl.rollout.servers.engine import TOKEN_VARIABLE
from lightning_megatron_rl.verify.pool import free_port

END_S = 60.0  # a server takes 20 s at most to end its own processes
LOOK_S = 0.2
PR_SET_PDEATHSIG = 1  # linux/prctl.h
VLLM_VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",  # routes for updates of weights
    "VLLM_HOST_IP": "127.0.0.1",  # it would ask the network
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # which compiles kernels when it first samples
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a directory
}


@dataclass(frozen=True)
class Servers:
    """Servers that answer."""

    urls: list[str]
    environment: dict[str, str]  # the trainer's, besides its own
    share: bool  # whether a server has a GPU of the trainer's; servers on one GPU have no group together


def choose_gpus(gpus: Sequence[str], trainer: int, servers: int) -> list[str]:
    """Return the GPU of each server: those behind the trainer's; where there are too few, the last one has several.

    Example:
        ``choose_gpus(["0", "1", "2"], trainer=1, servers=3) == ["1", "2", "2"]``
    """
    return [gpus[min(trainer + number, len(gpus) - 1)] for number in range(servers)]


@contextmanager
def serve(
    model: Path, arguments: Sequence[str], gpus: Sequence[str], trainer: int, servers: int, timeout_s: float
) -> Iterator[Servers]:
    """Start servers on the loopback interface, wait until all answer, and end them when it is left.

    Args:
        model: Its directory.
        arguments: Of `serve`, besides model, host and port.
        gpus: The machine's; empty: servers run on the CPU.
        trainer: GPUs that the trainer has, the first ones.
        servers: How many.
        timeout_s: Deadline of all starts together. # seconds

    Raises:
        RuntimeError: A server ended or was late, with the end of its output.
    """
    deadline, token = time.monotonic() + timeout_s, secrets.token_urlsafe(32)
    share = bool(gpus) and len(gpus) <= trainer
    places = choose_gpus(gpus, trainer, servers) if gpus else [""] * servers
    started: list[_Server] = []
    with tempfile.TemporaryDirectory() as logs:
        try:
            for number, gpu in enumerate(places):
                variables = {TOKEN_VARIABLE: token, "CUDA_VISIBLE_DEVICES": gpu}
                variables |= _host(f"server{number}") if share else {}
                log = Path(logs) / f"{number}.txt"
                started.append(_Server(["lightning_megatron_rl", "serve", str(model), *arguments], variables, log))
            own = {TOKEN_VARIABLE: token} | (_host("trainer") if share else {})
            _wait(started, deadline)
            with _telling(started):
                yield Servers([server.url for server in started], own, share)
        finally:
            _end(started)


@contextmanager
def serve_vllm(model: Path, arguments: Sequence[str], gpu: str, timeout_s: float) -> Iterator[str]:
    """Start vLLM's own server with the routes that trainers use, wait until it answers, and end it when it is left.

    Args:
        model: Its directory.
        arguments: Of vLLM, besides model, host and port.
        gpu: That it has; empty: it runs on the CPU.
        timeout_s: Deadline of its start. # seconds

    Raises:
        RuntimeError: It ended or was late, with the end of its output.
    """
    variables = {**VLLM_VARIABLES, "CUDA_VISIBLE_DEVICES": gpu}
    with tempfile.TemporaryDirectory() as logs:
        module = ["vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1", *arguments]
        started = [_Server(module, variables, Path(logs) / "vllm.txt")]
        try:
            _wait(started, time.monotonic() + timeout_s)
            with _telling(started):
                yield started[0].url
        finally:
            _end(started)


def _host(name: str) -> dict[str, str]:
    """Return variables of a process that is a host of its own to NCCL, which refuses two of one host on one GPU."""
    return {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo"}


class _Server:
    def __init__(self, module: Sequence[str], variables: dict[str, str], log: Path) -> None:
        port = free_port()
        self.url, self._log, self._token = f"http://127.0.0.1:{port}", log, variables.get(TOKEN_VARIABLE, "")
        command = [sys.executable, "-m", *module, "--port", str(port)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **variables, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,
            )

    def wait(self, deadline: float) -> None:
        """Wait until it answers.

        Raises:
            RuntimeError: It ended or is late.
        """
        while not self._answers():
            if (code := self.process.poll()) is not None:
                raise RuntimeError(f"the server {self.url} ended with {code}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server {self.url} does not answer in time:\n{self.tail()}")
            time.sleep(LOOK_S)

    def end(self) -> None:
        """Wait for its end, and kill it if that takes long: its own processes end with it."""
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _answers(self) -> bool:
        request = urllib.request.Request(f"{self.url}/health", headers={"Authorization": f"Bearer {self._token}"})
        try:
            with urllib.request.urlopen(request, timeout=5):
                return True
        except OSError:
            return False

    def tail(self) -> str:
        """Return the end of what it printed."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])


def _wait(started: Sequence[_Server], deadline: float) -> None:
    """Wait until all servers answer."""
    for server in started:
        server.wait(deadline)


@contextmanager
def _telling(started: Sequence[_Server]) -> Iterator[None]:
    """Show what servers printed if their trainer, which does not know it, ends with a RuntimeError."""
    try:
        yield
    except RuntimeError:
        for server in started:
            print(f"the server {server.url}:\n{server.tail()}", file=sys.stderr)
        raise


def _end(started: Sequence[_Server]) -> None:
    """End all servers at the same time."""
    for server in started:
        server.process.send_signal(signal.SIGTERM)
    for server in started:
        server.end()


def end_with_parent() -> None:
    """Let a child that is about to start end with this process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
