"""One vLLM server as a trainer sees it: its routes as coroutines, and whether it can sample at the moment."""

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.hdrs import LOCATION

from lightning_megatron_rl.rollout.protocol import SamplingParams
from lightning_megatron_rl.rollout.servers.about import About
from lightning_megatron_rl.rollout.servers.guard import ABOUT, GENERATE, INSTANCE, LEASE, RUN
from lightning_megatron_rl.weights.reads import Reads

log = logging.getLogger(__name__)

PROBE_S = 5.0  # deadline of a word that needs no work
CUT_S = 30.0  # of the end of a step
# half of the longest message: where somebody was held up, vLLM joins all tokens since, 175 bytes each
READ_BYTES = 2**24
_ENDS = ("stop", "length")  # why a whole response ends
READY, STALE, LOST = "ready", "without weights", "lost"  # states


class ServerLostError(RuntimeError):
    """The server does not answer, or cannot be used any more."""

    is_refused = False  # whether its host answers, and has no such server


class RequestRefusedError(RuntimeError):
    """What was asked for is refused, as it would be by any server: it is not asked again."""


class ServerRefusedError(ValueError):
    """The server answers, but not this trainer."""

    may_pass = False  # whether it is another trainer's, which may have ended


def check_url(url: str) -> str:
    """Return a URL without a slash at its end.

    Raises:
        ValueError: It is no URL of a server, or has a password in it.
    """
    wrong = (
        f"engine.urls: {url!r} is no address of a server: give http://host:port, with a port in [1, 65535] and an IPv6"
        " address in brackets"
    )
    try:
        parts = urlsplit(url)
    except ValueError as error:  # one bracket
        raise ValueError(wrong) from error
    if parts.username or parts.password:
        raise ValueError(f"engine.urls: a URL with a password in it ({parts.hostname}): give token_file instead")
    try:
        has_place = bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or too large
        has_place = False
    others = parts.path.strip("/") or parts.query or parts.fragment
    if parts.scheme not in ("http", "https") or not has_place or others or url != url.strip():
        raise ValueError(wrong)
    return url.rstrip("/")


class ServerClient:
    """Asks one server; all coroutines run on one event loop.

    Args:
        url: As `check_url` returns it; "" is not known yet, and comes by `move`.
        token: Of the server.
        run: Who asks, for the lease.
        timeout_s: Deadline of what takes work. # seconds
    """

    def __init__(self, url: str, token: str, run: str, timeout_s: float) -> None:
        self.url = url
        self.host = urlsplit(url).hostname or ""
        self.state = LOST  # until it has introduced itself
        self.about: About | None = None
        self.pushed: tuple[str, int] | None = None  # instance and version of the weights that it has
        self.met: str | None = None  # the instance whose workers are in a group with this trainer
        self.reads: list[Reads] | None = None  # what each of these workers reads of the weights; None: not known yet
        self.direct_key: str | None = None  # of their meeting with all ranks of the replica
        self.takes_buckets = False  # for as long as it has these workers: the ranks do not reach them, or lack a part
        self.load = 0  # responses under way
        self.failure: str | None = None  # why it will never answer, if somebody knows
        self.refusal = ""  # why it is not taken back, though it answers
        self._moved_at = 0.0  # when a response last began here, or had tokens
        self._run = run
        self._headers = {"Authorization": f"Bearer {token}", RUN: run}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._streams: set[aiohttp.ClientResponse] = set()  # of responses under way
        self._is_paused = True  # for all that is known: a trainer that has died may have left it so
        self._was_cut = False  # whether a response has ended before its end since the last pause
        self._dropping: asyncio.Future[bool] | None = None  # of what was cached, beside a push

    def forget_workers(self) -> None:
        """Know no more of its workers: they are gone, or other ones."""
        self.met, self.reads, self.direct_key = None, None, None
        self.takes_buckets = False

    @property
    def stands_still(self) -> str:
        """Say so if there was no token of any response for too long: its routes may answer, and its engine hang."""
        if not self.load or self._is_paused or time.monotonic() - self._moved_at < self._timeout_s:
            return ""
        return (
            f"the server {self.url} has given no token of {self.load} responses for {self._timeout_s:.0f} s"
            " (engine.call_timeout_s)"
        )

    async def move(self, url: str) -> None:
        """Ask at another address, or anew at this one, from now on; what is under way is lost."""
        before, self.url, self.host = self._session, url, urlsplit(url).hostname or ""
        self._dropping = None
        await self.open()
        for stream in self._streams:  # closing the session alone lets who reads one wait for ever
            stream.close()
        if before is not None:
            await before.close()

    async def open(self) -> None:
        """Be ready to ask, on this event loop."""
        if not self.url:
            return
        # a connection for each request: the server closes idle ones, and a request on one of them may be lost
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=PROBE_S)
        self._session = aiohttp.ClientSession(
            self.url,
            headers=self._headers,
            connector=connector,
            timeout=timeout,
            trust_env=False,
            read_bufsize=READ_BYTES,
        )

    async def close(self) -> None:
        """Give the lease back, if the server is there."""
        if self._session is None:
            return
        if self.state in (READY, STALE):
            try:
                await self._ask("DELETE", LEASE, PROBE_S)
            except (ServerLostError, ServerRefusedError) as error:
                log.info("%s", error)
        await self._session.close()

    async def introduce(self) -> About:
        """Return what the server says of itself.

        Raises:
            ServerLostError: It does not answer.
            ServerRefusedError: It is another kind of server, or the token is wrong.
        """
        plain = await self._ask("GET", ABOUT, PROBE_S)
        try:
            return About.read(plain)
        except TypeError as error:
            raise ServerRefusedError(
                f"the server {self.url} answers {ABOUT} with {str(plain)[:200]!r}: start it by `lightning-megatron-rl"
                " serve`."
            ) from error

    async def take_lease(self) -> tuple[str, bool, bool]:
        """Take or renew the lease.

        Returns:
            The server's instance, whether it has the weights of its start, and whether it may have another trainer's.

        Raises:
            ServerRefusedError: Another trainer has it; says who.
        """
        who = f"{socket.gethostname()}, process {os.getpid()}"
        answer = await self._ask("POST", LEASE, PROBE_S, text=who)
        if "instance" not in answer:
            raise ServerRefusedError(f"another program than a server answers at {self.url}: {str(answer)[:200]!r}")
        return str(answer["instance"]), bool(answer["is_fresh"]), bool(answer["is_others"])

    async def check_health(self) -> None:
        """Ask whether its engine works.

        Raises:
            ServerLostError: It does not.
        """
        await self._ask("GET", "/health", PROBE_S)

    async def pause(self, *, keep: bool = False) -> None:
        """Stop sampling, drop what is under way, and what was cached by `resume` at the latest.

        What is under way is frozen with its cache if that is to be kept. New requests do not find the cache: they have
        another salt.

        Where all responses have come to their ends, and nobody holds the cache, there is nothing to stop: vLLM's pause
        waits for 20 ms in any case. Then the cache is dropped while new weights come.

        What is dropped ends with the tokens that were drawn and not sent yet.
        """
        if keep and self.load:
            self._is_paused = True
            await self._ask("POST", "/pause?mode=keep&clear_cache=false", self._timeout_s)
            return
        is_idle = not (self.load or self._is_paused or self._was_cut)
        if self.state == READY and self.pushed is not None and is_idle:
            self._dropping = asyncio.ensure_future(self._drop_cache())
            self._dropping.add_done_callback(_look_at)
            return
        await self._abort()

    async def cut(self) -> None:
        """Drop what is under way, which ends with the tokens that were drawn, and sample nothing until `resume`."""
        self._is_paused = True
        await self._ask("POST", "/pause?mode=abort&clear_cache=false", min(self._timeout_s, CUT_S))

    async def resume(self) -> None:
        """Go on."""
        dropping, self._dropping = self._dropping, None
        if dropping is not None and not await dropping:
            await self._abort()
        if self._is_paused:
            await self._ask("POST", "/resume", self._timeout_s)
            self._is_paused = False
        self._moved_at = time.monotonic()

    async def _abort(self) -> None:
        self._is_paused = True
        await self._ask("POST", "/pause?mode=abort&clear_cache=true", self._timeout_s)
        self._was_cut = False
        await self._drop_cache()

    async def _drop_cache(self) -> bool:
        """Drop what was cached; False if a response is under way."""
        return bool((await self._ask("POST", "/reset_prefix_cache", self._timeout_s)).get("success"))

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of each worker with plain data; returns their answers."""
        body = {"method": method, "args": list(arguments), "timeout": self._timeout_s}
        answer = await self._ask("POST", "/collective_rpc", self._timeout_s, body=body)
        return list(answer["results"])

    async def _ask(
        self, method: str, path: str, timeout_s: float, *, body: Any = None, text: str | None = None
    ) -> dict[str, Any]:
        if self._session is None:
            raise ServerLostError("the server has no address yet")
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, path, json=body, data=text, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await response.text()
                self._check(response, path, answer)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            words = str(error) or f"no answer within {timeout_s:.0f} s"
            lost = ServerLostError(f"the server {self.url} does not answer {path}: {words}")
            lost.is_refused = isinstance(error, aiohttp.ClientConnectorError) and isinstance(
                error.os_error, ConnectionRefusedError
            )
            raise lost from error
        try:
            return dict(json.loads(answer)) if answer else {}
        except (ValueError, TypeError):
            return {"text": answer}

    def _check(self, response: aiohttp.ClientResponse, path: str, answer: str) -> None:
        status = response.status
        if status == 200:
            return
        if LOCATION in response.headers:
            raise ServerRefusedError(
                f"the server {self.url} leads to {response.headers[LOCATION]}, and the token goes to no other address:"
                " give that one."
            )
        try:
            said = json.loads(answer)["error"]
        except (ValueError, KeyError, TypeError):
            said = answer
        if status == 401:
            raise ServerRefusedError(
                f"the server {self.url} refuses the token. Give the one that it was started with (engine.token_file,"
                " engine.token or the variable LIGHTNING_MEGATRON_RL_TOKEN)."
            )
        if status == 409:
            refused = ServerRefusedError(f"the server {self.url} is not this trainer's: {said}.")
            refused.may_pass = True
            raise refused
        if status == 404 and path in (ABOUT, LEASE):
            raise ServerRefusedError(
                f"the server {self.url} has no {path}: plain vLLM, or another program. Start it by"
                " `lightning-megatron-rl serve`, which puts a guard before it and takes weights."
            )
        words = f"the server {self.url} answers {path} with status {status}: {str(said)[:500]}"
        if path == GENERATE and status in (400, 413, 422):
            raise RequestRefusedError(f"{words}. If a proxy is in between, it may limit the size of a request.")
        raise ServerLostError(words)

    async def generate(
        self, name: str, token_ids: list[int], params: SamplingParams, *, seed: int, max_tokens: int, salt: str
    ) -> AsyncIterator[tuple[list[int], list[float], str | None]]:
        """Sample one response; yields tokens, log-probs and, with the last, the reason of the end.

        One that `pause` has dropped ends without a reason.

        Raises:
            ServerLostError: The connection ended before the response.
            RequestRefusedError: The server, or a proxy before it, refuses the request.
        """
        assert self._session is not None
        assert self.about is not None
        own = {INSTANCE: self.about.instance}  # whose weights are known
        body = {
            "request_id": name,
            "token_ids": token_ids,
            "stream": True,
            "cache_salt": salt,
            "sampling_params": {
                "n": 1,
                "seed": seed,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "max_tokens": max_tokens,
                "stop": list(params.stop),
                "ignore_eos": params.ignore_eos,
                "logprobs": 0,
                "detokenize": bool(params.stop),
                "skip_special_tokens": False,  # as in `vllm_params`
            },
        }
        reason, was_dropped, self._moved_at = None, False, time.monotonic()
        try:
            async with self._session.post(GENERATE, json=body, headers=own, allow_redirects=False) as response:
                if response.status != 200:
                    self._check(response, GENERATE, await response.text())
                self._streams.add(response)
                try:
                    async for line in response.content:
                        if line.startswith(b"data: {"):
                            self._moved_at = time.monotonic()
                            for token_ids, logprobs, reason in self._read(line[6:]):
                                yield token_ids, logprobs, reason if reason in _ENDS else None
                    was_dropped = self._is_paused
                finally:
                    self._streams.discard(response)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerLostError(f"the connection to the server {self.url} ended: {error}") from error
        finally:
            is_whole = was_dropped or reason in _ENDS
            self._was_cut = self._was_cut or not is_whole
        if not is_whole:
            raise ServerLostError(f"the server {self.url} ended a response with {reason!r}")

    def _read(self, line: bytes) -> Iterator[tuple[list[int], list[float], str | None]]:
        """Read one event of a stream: tokens, log-probs, and why the response ended, if it has."""
        told = json.loads(line)
        if "choices" not in told:
            raise ServerLostError(f"the server {self.url} says: {str(told)[:500]}")
        for choice in told["choices"]:
            token_ids = list(choice["token_ids"] or [])
            content = (choice.get("logprobs") or {}).get("content") or []
            logprobs = [float(entry["logprob"]) for entry in content]
            if len(logprobs) != len(token_ids):
                raise ServerLostError(
                    f"the server {self.url} gave {len(logprobs)} log-probs of {len(token_ids)} tokens"
                )
            yield token_ids, logprobs, choice["finish_reason"]


def _look_at(done: asyncio.Future[bool]) -> None:
    """Let nobody complain of an error that is not waited for: a server that is lost may be so by another one."""
    if not done.cancelled():
        done.exception()
