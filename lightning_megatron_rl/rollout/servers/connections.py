"""The servers of one engine: an event loop in a thread of its own, their leases, and who is lost or back."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from lightning_megatron_rl.rollout.model_directory import CheckpointLayout
from lightning_megatron_rl.rollout.servers.about import WeightsOver, check_about, fingerprint, tokenizer_kind
from lightning_megatron_rl.rollout.servers.client import (
    LOST,
    READY,
    STALE,
    ServerClient,
    ServerLostError,
    ServerRefusedError,
)
from lightning_megatron_rl.rollout.servers.flights import Board
from lightning_megatron_rl.rollout.servers.guard import LEASE_S
from lightning_megatron_rl.utilities.notices import tell_loss
from lightning_megatron_rl.weights.direct import DirectPush, DirectRanks, held_views
from lightning_megatron_rl.weights.messages import HeldTensor
from lightning_megatron_rl.weights.source import DirectSender, WeightSource, WeightView
from lightning_megatron_rl.weights.transports.network import NetworkSender

RENEW_S = 3.0  # between two looks at a server, each of which renews the lease
LOST_AFTER_S = 10.0  # without an answer
TELL_S = 30.0  # between two words of what is waited for

log = logging.getLogger(__name__)


class Connections:
    """What an engine has between its `start` and its `close`.

    Args:
        servers: Of this replica.
        model_path: The trainer's model.
        max_model_len: That servers must take. # tokens
        start_timeout_s: How long to wait for one that does not answer. # seconds
        weights_over: What weights go over from ranks to workers.
    """

    def __init__(
        self,
        servers: list[ServerClient],
        model_path: str | Path,
        max_model_len: int,
        start_timeout_s: float,
        weights_over: WeightsOver = "auto",
    ) -> None:
        self.servers = servers
        self.layout = CheckpointLayout.read(model_path)
        self.board = Board()
        self.lock = threading.RLock()  # of whoever changes what is under way
        self.tasks: dict[str, asyncio.Task[None]] = {}  # of flights, by name; the event loop's own
        self.senders: dict[ServerClient, NetworkSender] = {}
        self._views: list[WeightView] = []  # of this update's weights, which are whole
        self._whole: dict[str, HeldTensor] = {}  # what they show, by name
        self._ranks: DirectRanks | None = None  # this rank alone, which has the whole model
        self.version = 0  # of the weights that sample
        self.num_lost = 0
        self.why = ""  # the last one was lost
        self.weights_over = weights_over
        self.has_told_of_buckets = False  # that NCCL is asked for and not used
        kind, tokenizer = fingerprint(model_path), tokenizer_kind(model_path)
        self._expected = (model_path, kind, max_model_len, weights_over, tokenizer)  # of a server
        self._start_timeout_s = start_timeout_s
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="vLLM servers", daemon=True)
        self._thread.start()

    @property
    def vocab_size(self) -> int:
        """Tokens that every server knows."""
        return min(server.about.vocab_size for server in self.servers if server.about is not None)

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def on_each(
        self, servers: list[ServerClient], work: Callable[[ServerClient], Coroutine[Any, Any, Any]]
    ) -> list[ServerClient]:
        """Do something on several servers at a time; those that fail are lost, the others are returned."""

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*(work(server) for server in servers), return_exceptions=True)

        results = self.run(all_of_them())
        return self.without(servers, dict(zip(servers, results, strict=True)))

    def without(self, servers: list[ServerClient], results: Mapping[ServerClient, Any]) -> list[ServerClient]:
        """Return the servers whose result is no exception; the others are lost."""
        for server in servers:
            if isinstance(error := results.get(server), Exception):
                self.lose(server, error)
        return [server for server in servers if not isinstance(results.get(server), Exception)]

    def direct_sender(self, source: WeightSource) -> DirectSender | None:
        """Return what sends the weights straight to workers; None if they come one by one, or lie scattered."""
        if source.direct is not None or source.whole is None:
            return source.direct
        # the same views show the same memory: looking at all of them takes milliseconds
        if [id(view) for view in source.whole.views] != [id(view) for view in self._views]:
            held = held_views(source.whole)
            if held is None:
                return None
            self._views, self._whole = source.whole.views, held
            holdings = {name: tensor.holding for name, tensor in held.items()}
            if self._ranks is None or self._ranks.holdings != [holdings]:
                self._ranks = DirectRanks(lambda: self._whole, source.device)
        assert self._ranks is not None
        return DirectPush(self._ranks)

    def let_go(self) -> None:
        """Drop what is held of an update's weights."""
        self._views, self._whole = [], {}
        if self._ranks is not None:
            self._ranks.let_go()

    def close(self) -> None:
        """Give the servers back; what is under way is lost."""

        async def end() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await asyncio.gather(*(server.close() for server in self.servers), return_exceptions=True)

        if self._ranks is not None:
            self._ranks.close()
        self.run(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    # ---- who is there ----------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Wait for all servers, check them, take their leases, and look after them from then on.

        Raises:
            ValueError: One refuses the token, is another trainer's, or has another model or version.
            RuntimeError: One does not answer in time.
        """

        async def all_of_them() -> list[Any]:
            deadline = time.monotonic() + self._start_timeout_s
            admitted = (self._admit(server, deadline) for server in self.servers)
            return await asyncio.gather(*admitted, return_exceptions=True)

        for result in self.run(all_of_them()):
            if isinstance(result, BaseException):
                raise result
        self._check_apart()
        for server in self.servers:
            asyncio.run_coroutine_threadsafe(self._look_after(server), self.loop)

    def _check_apart(self) -> None:
        seen: dict[str, str] = {}  # URL by instance
        for server in self.servers:
            assert server.about is not None
            other = seen.setdefault(server.about.instance, server.url)
            if other != server.url:
                raise ValueError(f"engine.urls: {other} and {server.url} are one server: name each once")

    async def _admit(self, server: ServerClient, deadline: float) -> None:
        """Wait for a server; the lease of a trainer that has just ended runs out first."""
        await server.open()
        told, leased_by = time.monotonic(), time.monotonic() + LEASE_S + RENEW_S
        while True:
            now = time.monotonic()
            try:
                server.about = await server.introduce()
                check_about(server.about, server.url, *self._expected)
                instance, is_fresh, _ = await server.take_lease()
                await server.check_health()
                await server.resume()  # a trainer that has died may have left it paused
                break
            except ServerRefusedError as error:
                if not error.may_pass or now > min(leased_by, deadline):
                    raise
            except ServerLostError as error:
                if server.failure is not None:
                    raise RuntimeError(server.failure) from error
                if now > deadline:
                    raise RuntimeError(
                        f"{error}. Is it running there, and may this host connect to it? It was waited for"
                        f" {self._start_timeout_s:.0f} s (engine.start_timeout_s)."
                    ) from error
                if now - told > TELL_S:
                    told = now
                    log.warning("waiting for a server: %s", error)
            await asyncio.sleep(1.0)
        # another trainer's weights are no model's that anybody asked for
        server.state, server.pushed = (READY, (instance, self.version)) if is_fresh else (STALE, None)

    async def _look_after(self, server: ServerClient) -> None:
        """Renew the lease, and notice a server that goes, or is back."""
        heard = time.monotonic()
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                instance, _, is_others = await server.take_lease()
                if is_others and server.pushed is not None:
                    server.pushed = None
                    self.lose(server, ServerLostError(f"another trainer had the server {server.url} meanwhile"))
                await server.check_health()
                is_new = server.about is None or server.about.instance != instance
                if is_new:
                    about = await server.introduce()
                    check_about(about, server.url, *self._expected)
                    server.about = about  # not before: one that was refused would not be looked at again
            except ServerLostError as error:
                if error.is_refused or time.monotonic() - heard > LOST_AFTER_S:
                    self.lose(server, error)
                continue
            except ValueError as error:
                if server.state == LOST and server.refusal != str(error):
                    log.warning("a server is not taken back: %s", error)
                server.refusal = str(error)
                self.lose(server, error)
                continue
            heard, server.refusal = time.monotonic(), ""
            has = server.pushed == (instance, self.version)
            if server.state == READY and is_new:
                self.lose(server, ServerLostError(f"the server {server.url} was started anew"))
            elif still := server.stands_still:
                self.lose(server, ServerLostError(still))
                server.pushed = None  # weights come first, which an engine that hangs does not take
                continue
            if server.state == LOST:
                log.warning("the server %s is back%s", server.url, "" if has else ": it waits for weights")
                server.state = READY if has else STALE

    def lose(self, server: ServerClient, error: Exception) -> None:
        """Use a server no more until it is back."""
        if server.state == LOST:
            return
        server.state = LOST
        self.num_lost += 1
        self.why = str(error)
        self.senders.pop(server, None)
        server.forget_workers()
        # a host that has gone without a word closes no connection: what is under way would wait for it
        asyncio.run_coroutine_threadsafe(server.move(server.url), self.loop)
        tell_loss(f"a server is lost, and its {server.load} responses go on elsewhere, or when one is back: {error}")
