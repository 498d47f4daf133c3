"""`ServerPool`: an engine made of vLLM servers on any host, of which some may be lost at any time."""

import asyncio
import logging
import threading
import time
import uuid
from functools import partial
from pathlib import Path

import torch

from lightning_megatron_rl.planner.needs import EngineNeeds
from lightning_megatron_rl.rollout.protocol import (
    DirectReport,
    Generation,
    GenerationRequest,
    Progress,
    SamplingParams,
    StreamingEngine,
    StreamMode,
    StreamRequest,
    SyncReport,
    WeightsLostError,
    check_requests,
)
from lightning_megatron_rl.rollout.servers.about import WeightsOver, refuse_nccl
from lightning_megatron_rl.rollout.servers.activity import PoolActivity
from lightning_megatron_rl.rollout.servers.client import (
    LOST,
    READY,
    STALE,
    ServerClient,
    ServerLostError,
    ServerRefusedError,
)
from lightning_megatron_rl.rollout.servers.connections import Connections
from lightning_megatron_rl.rollout.servers.flights import Flight, choose_server
from lightning_megatron_rl.rollout.servers.push import deliver, meet, send
from lightning_megatron_rl.rollout.turns import one_at_a_time
from lightning_megatron_rl.utilities.ranges import check_words
from lightning_megatron_rl.utilities.spans import JOIN_S, SpanLog
from lightning_megatron_rl.weights.source import WeightSource
from lightning_megatron_rl.weights.transports.network import NETWORK

POLL_S = 0.05
SETTLE_S = 1.0  # for what servers have drawn and not sent when they are paused
_MIB = 2**20

log = logging.getLogger(__name__)


class ServerPool(StreamingEngine):
    """The verbs of an engine made of vLLM servers; what says where these are, begins with `_open`.

    Responses go to the least busy server, those that begin alike to one that has their beginning in its cache. A server
    that is lost loses no response: each goes on from the tokens that are there, on another server, or when one is back.
    A server that comes back, here or at another address, samples again after the next push of weights.

    Weights go over the network to all servers at the same time: after a server's first update from each rank what it
    has, and to each worker what it loads. Responses under way at an update go on with the new weights; what was
    cached for them is computed anew, or kept (`streaming.on_update`).

    Args:
        num_servers: Of the run, which its replicas share.
        max_model_len: Longest prompt and response together, at most the servers'. # [tokens]
        call_timeout_s: Deadline of an update, of waiting for a token, and for a server when all are lost. # seconds
        bucket_mb: Size of the buffers that a rank sends weights to a server in. # MiB
        weights_over: What they go over then.

    Raises:
        ValueError: `weights_over` is none of the values.
    """

    streams = True
    is_apart = True
    takes_direct = True
    stream_mode: StreamMode | None = None
    devices: list[int] | None = None
    sleep_level = 0

    def __init__(
        self, num_servers: int, max_model_len: int, call_timeout_s: float, bucket_mb: int, weights_over: WeightsOver
    ) -> None:
        check_words({"weights_over": WeightsOver}, locals(), "engine.")
        self.num_servers = num_servers
        self.max_model_len = max_model_len
        self.call_timeout_s = call_timeout_s
        self.bucket_mb = bucket_mb
        self.weights_over = weights_over
        self.weight_version = 0
        self._spans = SpanLog(JOIN_S)
        self._connections: Connections | None = None
        self._activity: PoolActivity | None = None  # of these connections
        self._holds = False  # an update or `withdraw` is at the servers: nothing is begun
        self._failing_since: float | None = None  # updates, of all servers

    @property
    def connections(self) -> Connections:
        """What there is between `start` and `close`.

        Raises:
            RuntimeError: It is not started.
        """
        if self._connections is None:
            raise RuntimeError("the engine is not started; call start(model_path) first")
        return self._connections

    @property
    def num_restarts(self) -> int:  # type: ignore[override]
        """Servers that were lost since the start."""
        return 0 if self._connections is None else self._connections.num_lost

    @property
    def activity(self) -> SpanLog:  # type: ignore[override]
        """What the servers of this replica did until now."""
        if self._activity is not None:
            self._activity.note()
        return self._spans

    # ---- start and end ---------------------------------------------------------------------------------------------

    def _open(self, servers: list[ServerClient], model_path: str | Path, start_timeout_s: float) -> None:
        """Begin with servers; `connections.admit` then waits for them.

        Args:
            servers: Of this replica.
            model_path: The trainer's model.
            start_timeout_s: How long to wait for one that does not answer. # seconds

        Raises:
            ValueError: The directory holds no model, or weights go over NCCL and this process has no GPU.
            RuntimeError: The engine runs already.
        """
        if self._connections is not None:
            raise RuntimeError("the engine is already started; close() it before another start()")
        if self.weights_over == "nccl" and not torch.cuda.is_available():
            raise refuse_nccl("the trainer has no GPU")
        self.weight_version, self._failing_since = 0, None  # of a start before this one, maybe
        self._connections = Connections(servers, model_path, self.max_model_len, start_timeout_s, self.weights_over)
        self._activity = PoolActivity(self._connections.servers, self._spans)

    def wait_ready(self) -> None:
        """Do nothing: `start` has waited."""

    def close(self) -> None:
        """Give the servers back; what is under way is lost."""
        connections, self._connections, self._activity = self._connections, None, None
        if connections is not None:
            connections.close()

    def describe_needs(self) -> EngineNeeds | None:
        """Return that it takes nothing of the trainer's GPUs but buffers to send weights in."""
        return EngineNeeds(device="cpu", servers=self.num_servers, bucket_bytes=self.bucket_mb * _MIB)

    # ---- responses -------------------------------------------------------------------------------------------------

    async def _launch(self, flights: list[Flight]) -> None:
        """Send responses on their way; on the event loop."""
        for flight in flights:
            task = asyncio.create_task(self._fly(flight))
            self.connections.tasks[flight.request.name] = task

    async def _launch_the_rest(self) -> None:
        """Send on their way what an update has stopped; on the event loop."""
        connections = self.connections
        flights = [flight for flight in connections.board.flights.values() if not flight.is_complete]
        await self._launch([flight for flight in flights if flight.request.name not in connections.tasks])

    async def _fly(self, flight: Flight) -> None:
        """Bring a response to its end."""
        connections, activity, name = self.connections, self._activity, flight.request.name
        assert activity is not None
        failing_since: float | None = None  # without a token
        try:
            while not flight.is_complete:
                server, had = await self._find_server(flight), len(flight.token_ids)
                server.load += 1
                activity.note()
                try:
                    version = self.weight_version
                    async for token_ids, logprobs, reason in server.generate(
                        f"{name}/{uuid.uuid4().hex[:8]}",
                        flight.prompt,
                        flight.params,
                        seed=flight.seed(version),
                        max_tokens=flight.max_tokens,
                        salt=f"weights {version}",
                    ):
                        connections.board.land(flight, token_ids, logprobs, reason, version)
                        activity.note(len(token_ids))
                        version = self.weight_version  # of what is drawn from here on
                except (ServerLostError, ServerRefusedError) as error:
                    connections.lose(server, error)
                    connections.board.interrupt(flight)
                    failing_since = None if len(flight.token_ids) > had else failing_since or time.monotonic()
                    if failing_since is not None and time.monotonic() - failing_since > self.call_timeout_s:
                        raise RuntimeError(self._all_failed("that sampled")) from error
                finally:
                    server.load -= 1
                    activity.note()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            connections.board.fail(error)
        finally:
            connections.tasks.pop(name, None)

    async def _find_server(self, flight: Flight) -> ServerClient:
        """Wait for a server that can sample.

        Raises:
            WeightsLostError: Servers are there, and none has the weights.
            RuntimeError: All were lost for too long.
        """
        connections, deadline = self.connections, time.monotonic() + self.call_timeout_s
        while True:
            server = None if self._holds else choose_server(connections.servers, flight.prompt)
            if server is not None:
                return server
            if not self._holds and any(server.state == STALE for server in connections.servers):
                raise WeightsLostError(
                    f"no server has the weights of version {self.weight_version}, and some are back without: call"
                    " update_weights with a full set of weights"
                )
            if time.monotonic() > deadline:
                raise RuntimeError(self._all_lost("to sample"))
            await asyncio.sleep(POLL_S)

    def _take_in(self, requests: list[StreamRequest], params: SamplingParams) -> None:
        self.wait_ready()
        connections = self.connections
        whole = [GenerationRequest(r.token_ids, r.seed, max_tokens=r.max_tokens) for r in requests]
        check_requests(whole, params, vocab_size=connections.vocab_size, max_model_len=self.max_model_len)
        flights = [Flight(request, params) for request in requests]
        for flight in flights:
            connections.board.add(flight)
        connections.run(self._launch(flights))

    async def _settle(self, servers: list[ServerClient]) -> None:
        """Wait for the last tokens of what paused servers have dropped; on the event loop.

        To draw them again would end responses too soon: one that has come to its end is never drawn again.
        """
        deadline = time.monotonic() + SETTLE_S
        while any(server.load for server in servers) and time.monotonic() < deadline:
            await asyncio.sleep(SETTLE_S / 500)

    async def _stop(self, *, complete_alone: bool = False) -> None:
        """Stop what is under way, each at the tokens that have come, or only those that have all; on the event loop."""
        flights = list(self.connections.board.flights.values()) if complete_alone else []
        left = {flight.request.name for flight in flights if not flight.is_complete}
        tasks = [task for name, task in self.connections.tasks.items() if name not in left]
        for task in tasks:
            task.cancel()  # which closes its connection, so that the server drops the response
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def call_lock(self) -> threading.RLock:
        """Who has it may change what is under way."""
        return self.connections.lock

    @one_at_a_time
    def generate(self, requests: list[GenerationRequest], params: SamplingParams) -> list[list[Generation]]:
        """Sample `num_generations` responses for each request.

        Raises:
            ValueError: A request is refused; see `check_requests`.
            WeightsLostError: The servers that are there have no weights.
            RuntimeError: All servers were lost for too long, or responses of a stream are under way.
        """
        self.wait_ready()
        connections = self.connections
        check_requests(requests, params, vocab_size=connections.vocab_size, max_model_len=self.max_model_len)
        if connections.board.flights:
            raise RuntimeError("responses of a stream are under way: withdraw them first")
        asked = [
            StreamRequest(f"{number}/{place}", r.token_ids, r.seed + place, r.max_tokens or params.max_tokens)
            for number, r in enumerate(requests)
            for place in range(r.num_generations)
        ]
        found: dict[str, Progress] = {}
        try:
            self._take_in(asked, params)
            while len(found) < len(asked):
                connections.board.raise_error()
                connections.board.wait(1.0)
                found |= {news.name: news for news in connections.board.take_news(everything=False)}
        except BaseException:
            self._drop()
            raise
        return [
            [_generation(found[f"{number}/{place}"]) for place in range(request.num_generations)]
            for number, request in enumerate(requests)
        ]

    @one_at_a_time
    def submit(self, requests: list[StreamRequest], params: SamplingParams) -> None:
        """Take responses in, beside those under way; see `StreamingEngine`.

        Raises:
            ValueError: A request is refused; see `check_requests`.
        """
        self._take_in(requests, params)

    def collect(self, wait_s: float, *, everything: bool = False) -> list[Progress]:
        """Wait until a response is complete, at most `wait_s` seconds; return what is new of complete ones, or of all.

        Raises:
            WeightsLostError: The servers that are there have no weights; responses go on after the next update.
            RuntimeError: All servers were lost for too long.
        """
        board = self.connections.board
        if board.flights and wait_s > 0:
            board.wait(wait_s)
        board.raise_error()
        return board.take_news(everything=everything)

    def hold(self) -> None:
        """Do nothing: servers sample all the time."""

    @one_at_a_time
    def withdraw(self) -> list[Progress]:
        """Stop all responses under way and return what is new of them, what servers have drawn and not sent with it."""
        connections = self.connections
        busy = {server: server.pushed for server in connections.servers if server.state == READY and server.load}
        for server in busy:
            server.pushed = None  # until it samples again: one that is lost may come back paused, and waits for weights
        self._holds = True
        try:
            connections.run(self._settle(connections.on_each(list(busy), ServerClient.cut)))
            return self._drop()
        finally:
            cut = [server for server in busy if server.state == READY]
            for server in connections.on_each(cut, ServerClient.resume):
                server.pushed = busy[server]
            self._holds = False

    def _drop(self) -> list[Progress]:
        """Stop all responses under way where they are; return what is new of them."""
        connections = self.connections
        connections.run(self._stop())
        news = connections.board.take_news(everything=True)
        connections.board.flights.clear()
        connections.board.error = None
        return news

    # ---- weights ---------------------------------------------------------------------------------------------------

    @one_at_a_time
    def update_weights(self, source: WeightSource, version: int) -> SyncReport:
        """Push a full set of weights to all servers that are there, at the same time.

        Raises:
            ValueError: The names or shapes differ from those of the model's directory, or weights go over NCCL and are
                not on a GPU.
            WeightsLostError: Every server was lost meanwhile; update again.
            RuntimeError: No server was there for too long, or none that took weights.
        """
        self.wait_ready()
        with self._spans.during("update"):
            self._holds = True
            try:
                report = self._update(source, version)
            finally:
                self._holds = False
            self.connections.run(self._launch_the_rest())
        return report

    def _update(self, source: WeightSource, version: int) -> SyncReport:
        began, connections = time.perf_counter(), self.connections
        if self.weights_over == "nccl" and source.device.type != "cuda":
            raise refuse_nccl(f"the trainer's weights are on {source.device.type}")
        checked = connections.layout.check_source(source)
        there = self._wait_for_any()
        keep = self.stream_mode is not None and self.stream_mode.keeps_cache
        if not keep:
            connections.run(self._stop(complete_alone=True))  # what a server has sent whole keeps nobody busy
        there = connections.on_each(there, partial(ServerClient.pause, keep=keep))
        if not keep:
            connections.run(self._settle(there))
            connections.run(self._stop())
        for server in connections.servers:
            server.pushed = None  # until it has these: this version's number may have been that of other weights
        there = meet(connections, there, self.call_timeout_s)
        direct = deliver(connections, checked, there, self.bucket_mb * _MIB)
        loaded, num_bytes, largest = send(
            connections, checked, direct.others, self.bucket_mb * _MIB, record=direct.is_possible
        )
        loaded = [server for server in direct.done + loaded if server.state != LOST]
        self.weight_version = connections.version = version  # of tokens that come from now on
        there = connections.on_each(loaded, ServerClient.resume)
        for server in there:
            assert server.about is not None
            server.state, server.pushed = READY, (server.about.instance, version)
        for server in connections.servers:
            if server not in there and server.state == READY:
                server.state = STALE  # it was back too late for this update
        connections.board.error = None
        if not there:
            self._failing_since = self._failing_since or time.monotonic()
            if time.monotonic() - self._failing_since > self.call_timeout_s:
                raise RuntimeError(self._all_failed("that took weights"))
            raise WeightsLostError(f"every server was lost during the update to version {version}: update again")
        self._failing_since = None
        seconds = time.perf_counter() - began
        num_bytes = max(num_bytes, direct.num_bytes)
        rate = num_bytes / 1e6 / seconds
        log.info("weights of version %d to %d server(s): %.3f s, %.0f MB/s to each", version, len(there), seconds, rate)
        if direct.report is not None:
            _tell(direct.report, len(direct.done))
        largest = max(largest, direct.buffer_bytes)
        return SyncReport(num_bytes, seconds, largest, NETWORK, direct=direct.report)

    def _wait_for_any(self) -> list[ServerClient]:
        servers, deadline = self.connections.servers, time.monotonic() + self.call_timeout_s
        while all(server.state == LOST for server in servers):
            if time.monotonic() > deadline:
                raise RuntimeError(self._all_lost("to take weights"))
            time.sleep(POLL_S)
        return [server for server in servers if server.state != LOST]

    def _all_lost(self, what: str) -> str:
        known = (server.refusal or server.url or "one that is not placed" for server in self.connections.servers)
        return f"no server was there {what} for {self.call_timeout_s:.0f} s (engine.call_timeout_s): {', '.join(known)}"

    def _all_failed(self, what: str) -> str:
        return f"{self._all_lost(what)}. The last one was lost by: {self.connections.why}"

    def let_go(self) -> None:
        """Drop what is held of the trainer's weights; servers have their own."""
        if self._connections is not None:
            self._connections.let_go()


def _tell(report: DirectReport, count: int) -> None:
    log.info(
        "straight from the ranks to %d server(s): %.1f MB, %.1f MB to the worker that got most; %.3f s, %.0f MB/s,"
        " %.0f %% of what the links carried when they met",
        count,
        report.num_bytes / 1e6,
        report.worker_bytes / 1e6,
        report.seconds,
        report.rate / 1e6,
        100 * report.link_share,
    )


def _generation(news: Progress) -> Generation:
    assert news.finish_reason is not None
    return Generation(news.token_ids, news.logprobs, news.finish_reason)
