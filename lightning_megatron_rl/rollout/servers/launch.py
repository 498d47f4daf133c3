"""Starts vLLM's server on this host, with the guard before every route and ours to receive weights."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_megatron_rl.devices.checks import check_processors
from lightning_megatron_rl.devices.facts import PROCESSORS
from lightning_megatron_rl.rollout.model_directory import CheckpointLayout
from lightning_megatron_rl.rollout.servers.about import (
    About,
    fingerprint,
    installed_vllm,
    tokenizer_kind,
    vocabulary_size,
)
from lightning_megatron_rl.rollout.servers.guard import SETTINGS
from lightning_megatron_rl.rollout.servers.nodes import EngineNodes
from lightning_megatron_rl.rollout.servers.process_group import end_group, members, shared_files
from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine
from lightning_megatron_rl.rollout.vllm.installation import choose_device, installed_packages, why_no_gpu
from lightning_megatron_rl.rollout.vllm.process import child_environment
from lightning_megatron_rl.rollout.vllm.settings import engine_environment, llm_arguments
from lightning_megatron_rl.rollout.vllm.sockets import SOCKETS_VARIABLE, SocketDirectory
from lightning_megatron_rl.utilities.cpus import openmp_defaults, sampler_threads
from lightning_megatron_rl.utilities.versions import __version__
from lightning_megatron_rl.weights.transports.network import EXTENSION

SERVER_MODULE = "lightning_megatron_rl.rollout.servers.server_process"
OTHERS_GRACE_S = 3.0  # for the server's own processes when it has ended
LOOK_S = 0.2
NOTE_S = 2.0  # between two looks at what the processes share


def server_settings(
    model: str,
    engine: VLLMEngine,
    address: tuple[str, int],
    digest: str,
    inherited: Mapping[str, str],
    nodes: EngineNodes | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return vLLM's arguments and the environment of its processes.

    Args:
        model: Hugging Face directory.
        engine: Has the settings; it is not started.
        address: Where to listen.
        digest: Of the token, which the server's processes need not know.
        inherited: The environment that theirs begins with.
        nodes: That share the engine; None: this one has it alone.

    Raises:
        ValueError: The directory holds no model, an argument does not work here, or only a part of the GPU's processors
            may be used.
        RuntimeError: vLLM is missing, or another one than the machine needs.
    """
    device = choose_device(engine.device, installed_packages(), no_gpu=why_no_gpu())
    if device == "cuda":
        check_processors(inherited.get(PROCESSORS))
    layout = CheckpointLayout.read(model)
    eager = engine.enforce_eager if engine.enforce_eager is not None else device == "cpu"
    arguments = llm_arguments(
        engine,
        str(Path(model).resolve()),
        device,
        stored_dtype=layout.dtype,
        eager=eager,
        architectures=layout.architectures,
        extension=EXTENSION,
    )
    size = engine.tensor_parallel_size
    threads = engine.num_threads or sampler_threads(layout.num_parameters, size, dict(os.environ))
    environment = engine_environment(
        device,
        layout.architectures,
        eager=eager,
        tensor_parallel_size=size,
        num_threads=threads if device == "cpu" else None,
        dtype=arguments["dtype"],
    )
    about = About(
        version=__version__,
        vllm=installed_vllm(),
        model=arguments["model"],
        fingerprint=fingerprint(model),
        dtype=arguments["dtype"],
        max_model_len=engine.max_model_len,
        vocab_size=vocabulary_size(model),
        num_workers=size,
        device=device,
        instance=uuid.uuid4().hex,
        tokenizer=tokenizer_kind(model),
    )
    own = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # the server's engine core has a process of its own
        "VLLM_API_KEY": "",  # of an other server, maybe, that this environment is for: the guard has a token
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that change weights, behind the guard
        SETTINGS: json.dumps({"digest": digest, "about": about.to_plain()}),
    }
    changes = openmp_defaults() | environment | own
    host, port = address
    arguments |= {"host": host, "port": port}
    if nodes is not None:
        arguments |= nodes.arguments()
        changes |= nodes.environment(host, inherited)
    return arguments, child_environment(dict(inherited), changes)


class Server:
    """vLLM's server as one group of processes, which ends as a whole: with `end`, or with this process.

    Args:
        arguments: As `server_settings` returns them.
        environment: As well.
        stderr: Where the server's errors go, as `subprocess` has it; None: where this process's go.
    """

    def __init__(self, arguments: dict[str, Any], environment: dict[str, str], stderr: int | None = None) -> None:
        self._sockets = SocketDirectory()  # vLLM leaves its own
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", SERVER_MODULE, str(os.getpid())],
            env={SOCKETS_VARIABLE: str(self._sockets.path)} | environment,
            stdin=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
        self._shared: set[Path] = set()
        self._looked_at = 0.0
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments).encode())
        self._process.stdin.close()

    @property
    def is_running(self) -> bool:
        """Whether it runs; ask every few seconds, since what its processes share is noted here."""
        # it is not collected while it has a group: the group's number cannot be another one's then
        if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        if time.monotonic() - self._looked_at > NOTE_S:
            self._looked_at = time.monotonic()
            self._shared |= shared_files(self._process.pid)
        return True

    def ask_to_end(self) -> None:
        """Tell it to end in good order."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended, at most so long; returns whether it has."""
        deadline = time.monotonic() + timeout_s
        while self.is_running and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return not self.is_running

    def end(self) -> int:
        """End all of its processes now, remove what they shared, and return its exit code."""
        group = self._process.pid
        if not self.is_running:  # its own processes remove what they share
            deadline = time.monotonic() + OTHERS_GRACE_S
            while set(members(group)) - {group} and time.monotonic() < deadline:
                time.sleep(LOOK_S)
        end_group(group, self._shared)
        self._sockets.close()
        return self._process.wait()
