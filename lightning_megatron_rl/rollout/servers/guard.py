"""The guard before every route of a vLLM server: a token, one trainer at a time, and no route that is not needed.

vLLM's own `--api-key` leaves the routes open that change weights. This is an ASGI middleware, which vLLM takes by
`--middleware`; it imports nothing of this package that a server would wait for.
"""

import hashlib
import hmac
import json
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

SETTINGS = "LIGHTNING_MEGATRON_RL_SERVER"  # variable with the guard's settings as JSON
RUN = "x-run"  # header with which a trainer says who it is
INSTANCE = "x-instance"  # and the start of the server that it means: behind an address may be another one by now
LEASE_S = 15.0  # after which a trainer that was not heard of has lost the server
ABOUT, LEASE = "/about", "/lease"
GENERATE = "/inference/v1/generate"
CALL = "/collective_rpc"  # of methods of the workers, such as those that take weights
FREE_ROUTES = {("GET", "/health"), ("GET", "/metrics")}  # for whoever has the token
ROUTES = {  # for the trainer that has the lease
    ("POST", GENERATE),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", CALL),
    ("POST", "/reset_prefix_cache"),
}
_MOST_LEASE_BYTES = 4096

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def token_digest(token: str) -> str:
    """Return what the server's processes know of the token."""
    return hashlib.sha256(token.encode()).hexdigest()


class Guard:
    """Lets requests through that have the token, and those that work with weights from one trainer alone.

    Args:
        app: The server behind it.
        settings: ``{"digest": of the token, "about": {...}}``; by default those in the environment.
        clock: Seconds.
    """

    def __init__(
        self, app: App, settings: dict[str, Any] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        found = json.loads(os.environ[SETTINGS]) if settings is None else settings
        self._digest: str = found["digest"]
        self._about: dict[str, Any] = found["about"]
        self._clock = clock
        self._run: str | None = None  # that has the lease
        self._who = ""
        self._heard = 0.0
        self._loaded_by: str | None = None  # whose weights it may have; None: it has those that it was started with

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer, or hand on to the server."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # websockets: nothing of ours
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(token_digest(token), self._digest):
            await _answer(send, 401, {"error": "the token is missing or wrong"})
            return
        route, run = (scope["method"], scope["path"]), headers.get(RUN)
        if route == ("GET", ABOUT):
            await _answer(send, 200, self._about)
        elif scope["path"] == LEASE:
            await self._lease(scope["method"], run, await _body(receive), send)
        elif route in FREE_ROUTES:
            await self._app(scope, receive, send)
        elif route not in ROUTES:
            await _answer(send, 404, {"error": f"{scope['method']} {scope['path']} is not served here"})
        elif run is None or run != self._holder():
            await _answer(send, 409, {"error": self._taken()})
        elif headers.get(INSTANCE, self._about["instance"]) != self._about["instance"]:
            await _answer(send, 409, {"error": "it was started anew"})
        else:
            self._heard = self._clock()
            if scope["path"] == CALL:
                self._loaded_by = run
            await self._app(scope, receive, send)

    def _holder(self) -> str | None:
        return self._run if self._clock() - self._heard < LEASE_S else None

    def _taken(self) -> str:
        holder = self._holder()
        return "take the lease first" if holder is None else f"this server is another trainer's: {self._who}"

    async def _lease(self, method: str, run: str | None, body: bytes, send: Send) -> None:
        """Give the server to a trainer (POST), or take it back (DELETE)."""
        if not run:
            await _answer(send, 400, {"error": f"the header {RUN} says who wants the lease"})
        elif self._holder() not in (None, run):
            await _answer(send, 409, {"error": self._taken()})
        elif method == "DELETE":
            self._run = None
            await _answer(send, 200, {})
        elif method == "POST":
            self._run, self._heard = run, self._clock()
            self._who = body.decode(errors="replace")
            told = {"is_fresh": self._loaded_by is None, "is_others": self._loaded_by not in (None, run)}
            await _answer(send, 200, {"instance": self._about["instance"], **told})
        else:
            await _answer(send, 405, {"error": f"{method} {LEASE}"})


async def _body(receive: Receive) -> bytes:
    body = b""
    while len(body) < _MOST_LEASE_BYTES:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    return body[:_MOST_LEASE_BYTES]


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
