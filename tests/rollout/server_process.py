"""Starts ``lightning-megatron-rl serve``, and small servers with the same guard."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import uvicorn

from lightning_megatron_rl.rollout.servers.guard import GENERATE, Guard, token_digest
from tests.distributed import CHILD_PATH, ROOT, free_port

TOKEN = "0123456789abcdef-of-a-test"
START_S = 400.0  # on a busy machine


def serve_command(model: Path, port: int, host: str = "127.0.0.1", *more: str) -> list[str]:
    """The command line of a small server, with `more` arguments."""
    sizes = ["--max-model-len", "512", "--kv-cache-memory-gb", "0.25", "--num-threads", "1"]
    place = ["--host", host, "--port", str(port)]
    return [sys.executable, "-m", "lightning_megatron_rl", "serve", str(model), *place, *sizes, *more]


def ask(url: str, path: str, token: str | None = TOKEN, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and answer of one request."""
    known = {} if token is None else {"Authorization": f"Bearer {token}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json", **known, **headers})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class ServerProcess:
    """One `serve` on this machine.

    Args:
        model: What it serves.
        log: File that its output goes to.
        more: Arguments.
        environment: Its own variables.
    """

    def __init__(self, model: Path, log: Path, *more: str, environment: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._model = model
        self._more = more
        self._environment = dict(environment or {})
        self.start()

    def start(self) -> None:
        path = os.pathsep.join([CHILD_PATH, *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {"LIGHTNING_MEGATRON_RL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                serve_command(self._model, self.port, "127.0.0.1", *self._more),
                env={**os.environ, **variables, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + START_S
        while True:
            with suppress(OSError):
                if ask(self.url, "/health")[0] == 200:
                    return
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)

    def start_again(self) -> None:
        """Start it when it has ended, and wait until it answers."""
        self.process.wait(60)
        self.start()
        self.wait()

    def family(self) -> list[int]:
        """Ids of all processes below it, the API server first."""
        return [process.pid for process in psutil.Process(self.process.pid).children(recursive=True)]

    def engine_core(self) -> int:
        """Id of the process with the worker."""
        return max(self.family()[1:], key=lambda pid: psutil.Process(pid).memory_info().rss)

    def stop(self) -> int:
        """End it as a launcher does; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def guarded(
    about: dict[str, Any],
    silent: str | None = None,
    first: str = "",
    refused: int = 0,
    gone: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
    **answers: Any,
) -> Iterator[str]:
    """A server with the real guard, and behind it one that answers by path; yields its URL.

    Args:
        about: What it says of itself.
        silent: Path of a request that gets no answer, or only the beginning of one.
        first: That beginning.
        refused: Status of the answer to requests for responses; 0: they are not refused.
        gone: While it is set, another program answers at the address.
        clock: Of the guard. # seconds
        answers: Others, by path.
    """

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == silent:
            if first:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": first.encode(), "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        body = json.dumps(answers.get(scope["path"].strip("/"), {})).encode()
        status = refused if refused and scope["path"] == GENERATE else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    guard = Guard(app, {"digest": token_digest(TOKEN), "about": about}, clock)

    async def front(scope: Any, receive: Any, send: Any) -> None:
        if gone is None or not gone.is_set():
            await guard(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"<html>"})

    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(front, lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
