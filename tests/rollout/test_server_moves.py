"""Servers that move: a client asks at the other address, and samples there only with the newest weights."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_megatron_rl.rollout.model_directory import CheckpointLayout
from lightning_megatron_rl.rollout.protocol import GenerationRequest, SamplingParams, StreamRequest, WeightsLostError
from lightning_megatron_rl.rollout.servers import connections as watching
from lightning_megatron_rl.rollout.servers import pool
from lightning_megatron_rl.rollout.servers.about import About, fingerprint
from lightning_megatron_rl.rollout.servers.activity import PoolActivity
from lightning_megatron_rl.rollout.servers.client import LOST, READY, STALE, ServerClient, ServerLostError
from lightning_megatron_rl.rollout.servers.connections import Connections
from lightning_megatron_rl.rollout.servers.engine import VLLMServers
from lightning_megatron_rl.rollout.servers.flights import Flight
from lightning_megatron_rl.rollout.servers.guard import GENERATE, LEASE_S
from lightning_megatron_rl.rollout.servers.push import Deliveries
from lightning_megatron_rl.utilities.spans import SpanLog
from lightning_megatron_rl.weights.direct import DirectPush
from lightning_megatron_rl.weights.source import WeightSource, WeightView, WeightViews
from tests.rollout.server_process import TOKEN, guarded
from tests.rollout.test_server_guard import ABOUT

FIRST = 'data: {"choices": [{"token_ids": [7], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": null}]}\n'


@pytest.fixture
def about(qwen3_dir, monkeypatch) -> About:
    monkeypatch.setattr(watching, "RENEW_S", 0.1)
    return replace(ABOUT, fingerprint=fingerprint(qwen3_dir))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def connect(stack: ExitStack, model: str, *urls: str, wait_s: float = 5.0) -> Connections:
    clients = [ServerClient(url, TOKEN, "run", 5.0) for url in urls]
    connections = Connections(clients, model, 512, wait_s)
    stack.callback(connections.close)
    return connections


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_server_that_moved_waits_for_weights(about, stack, qwen3_dir):
    first = stack.enter_context(guarded(about.to_plain()))
    second = stack.enter_context(guarded(replace(about, instance="another", vocab_size=100).to_plain()))
    connections = connect(stack, qwen3_dir, first)
    connections.admit()
    (client,) = connections.servers
    assert (client.state, connections.vocab_size) == (READY, about.vocab_size)
    connections.lose(client, ServerLostError("it has ended"))
    connections.run(client.move(second))
    until(lambda: client.state == STALE)
    assert (client.url, client.host, connections.vocab_size) == (second, "127.0.0.1", 100)


def test_a_server_that_its_last_trainer_left_paused_goes_on(about, stack, qwen3_dir, monkeypatch):
    """A trainer may die in a push; a request to a server that is paused would wait for ever."""
    calls, ask = [], ServerClient._ask

    async def spy(client: ServerClient, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        calls.append(path)
        return await ask(client, method, path, *arguments, **options)

    monkeypatch.setattr(ServerClient, "_ask", spy)
    connect(stack, qwen3_dir, stack.enter_context(guarded(about.to_plain()))).admit()
    assert calls.count("/resume") == 1


@pytest.mark.parametrize("change", [{"fingerprint": "another"}, {"vllm": "0.1"}, {"max_model_len": 8}])
def test_a_server_that_was_started_anew_with_something_else_is_not_taken_back(about, stack, qwen3_dir, change):
    """However often it is looked at."""
    plain = about.to_plain()
    connections = connect(stack, qwen3_dir, stack.enter_context(guarded(plain)))
    connections.admit()
    (client,), looks, introduce = connections.servers, [], ServerClient.introduce

    async def look(client: ServerClient) -> About:
        looks.append(client.state)
        return await introduce(client)

    with patch.object(ServerClient, "introduce", look):
        plain.update(change, instance="another")
        until(lambda: len(looks) > 4)
        assert looks[1:] == [LOST] * (len(looks) - 1)
        plain.update(about.to_plain(), instance="a third")
        until(lambda: client.state == STALE)


def test_why_a_server_is_not_taken_back_is_told_though_it_was_lost_before(about, stack, qwen3_dir, caplog):
    """It ends, and is started anew with another model: nobody would look for that when no server is there."""
    plain = about.to_plain()
    url = stack.enter_context(guarded(plain))
    engine = VLLMServers([url], TOKEN, max_model_len=512, call_timeout_s=1.0)
    engine.start(qwen3_dir)
    stack.callback(engine.close)
    (client,) = engine.connections.servers
    engine.connections.run(client.move("http://127.0.0.1:1"))
    until(lambda: client.state == LOST)
    plain.update(fingerprint="another", instance="another")
    engine.connections.run(client.move(url))
    words = f"the server {url} has another model, /models/a"
    with pytest.raises(RuntimeError, match=rf"no server was there to sample for 1 s .*{words}"):
        engine.generate([GenerationRequest([5, 6], 1)], SamplingParams(max_tokens=10))
    told = [record.getMessage() for record in caplog.records if words in record.getMessage()]
    assert len(told) == 1


def test_a_server_that_is_lost_while_it_is_cut_waits_for_weights(about, stack, qwen3_dir):
    """It may be back paused, which only the next push of weights ends: what goes there would wait for ever."""
    engine = VLLMServers([stack.enter_context(guarded(about.to_plain()))], TOKEN, max_model_len=512)
    engine.start(qwen3_dir)
    stack.callback(engine.close)
    (client,) = engine.connections.servers
    client.load = 1

    async def cut(client: ServerClient) -> None:
        raise ServerLostError("no answer")

    with patch.object(ServerClient, "cut", cut):
        assert engine.withdraw() == []
    client.load = 0
    until(lambda: client.state == STALE)


def test_another_program_at_a_servers_address_is_lost(about, stack, qwen3_dir):
    gone = threading.Event()
    connections = connect(stack, qwen3_dir, stack.enter_context(guarded(about.to_plain(), gone=gone)))
    connections.admit()
    (client,) = connections.servers
    gone.set()
    until(lambda: client.state == LOST)
    gone.clear()
    until(lambda: client.state == READY)


@pytest.mark.parametrize("status", [400, 413])
def test_a_request_that_is_refused_is_not_asked_again(about, stack, qwen3_dir, status):
    """It would be refused for ever: by the server itself, or by a proxy before it."""
    url = stack.enter_context(guarded(about.to_plain(), refused=status))
    engine = VLLMServers([url], TOKEN, max_model_len=512)
    engine.start(qwen3_dir)
    stack.callback(engine.close)
    with pytest.raises(RuntimeError, match=f"answers /inference/v1/generate with status {status}.* may limit the size"):
        engine.generate([GenerationRequest([5, 6], 1)], SamplingParams(max_tokens=10))
    assert engine.num_restarts == 0


def test_a_server_that_fails_each_request_is_not_asked_for_ever(about, stack, qwen3_dir):
    """Its health is good, so that it is back in seconds."""
    url = stack.enter_context(guarded(about.to_plain(), refused=500))
    engine = VLLMServers([url], TOKEN, max_model_len=512, call_timeout_s=1.0)
    engine.start(qwen3_dir)
    stack.callback(engine.close)
    ended = threading.Timer(20.0, engine.close)
    ended.start()
    stack.callback(ended.join)
    stack.callback(ended.cancel)
    words = (
        r"no server was there that sampled for 1 s .* by: the server \S+ answers /inference/v1/generate with status 500"
    )
    with pytest.raises(RuntimeError, match=words):
        engine.generate([GenerationRequest([5, 6], 1)], SamplingParams(max_tokens=10))


def test_a_server_without_an_address_is_waited_for(about, stack, qwen3_dir):
    url = stack.enter_context(guarded(about.to_plain()))
    connections = connect(stack, qwen3_dir, "")
    (client,) = connections.servers
    with pytest.raises(ServerLostError, match="has no address yet"):
        connections.run(client.check_health())
    connections.loop.call_soon_threadsafe(lambda: connections.loop.create_task(client.move(url)))
    connections.admit()
    assert client.state == READY


def test_a_server_that_will_never_answer_is_not_waited_for(stack, qwen3_dir):
    connections = connect(stack, qwen3_dir, "", wait_s=300.0)
    (client,) = connections.servers
    client.failure = "engine 0 on Ray has ended: out of memory"
    with pytest.raises(RuntimeError, match="engine 0 on Ray has ended: out of memory"):
        connections.admit()
    assert client.state == LOST


@pytest.mark.parametrize("first", ["", FIRST])
def test_responses_of_a_server_that_falls_silent_leave_it(about, stack, qwen3_dir, first):
    """Its connections stay open: nobody has closed them."""
    url = stack.enter_context(guarded(about.to_plain(), "/inference/v1/generate", first))
    engine = VLLMServers([url], TOKEN, max_model_len=512)
    engine.start(qwen3_dir)
    stack.callback(engine.close)
    engine.submit([StreamRequest("a", [5, 6], 1, 10)], SamplingParams(max_tokens=10))
    (server,) = engine.connections.servers
    until(lambda: server.load == 1)
    (flight,) = engine.connections.board.flights.values()
    until(lambda: flight.token_ids == ([7] if first else []))
    engine.connections.lose(server, ServerLostError("it was silent for 10 s"))
    until(lambda: server.load == 0 and engine.num_restarts == 1)
    until(lambda: server.load == 1)  # it is back
    assert list(engine.connections.board.flights) == ["a"]


def test_a_server_whose_engine_hangs_is_lost_until_it_takes_weights(about, stack, qwen3_dir):
    """What does not need the engine is answered, health too, and no connection ends."""
    url = stack.enter_context(guarded(about.to_plain(), "/inference/v1/generate", FIRST))
    engine = VLLMServers([url], TOKEN, max_model_len=512, call_timeout_s=1.0)
    engine.start(qwen3_dir)
    stack.callback(engine.close)
    began = time.monotonic()
    with pytest.raises(WeightsLostError):
        engine.generate([GenerationRequest([5, 6], 1)], SamplingParams(max_tokens=10))
    assert 1.0 < time.monotonic() - began < 60.0
    assert (engine.num_restarts, engine.connections.servers[0].state) == (1, STALE)


def test_a_response_whose_server_is_lost_in_an_update_waits_for_its_end(about, stack, qwen3_dir):
    """Another server may have some of the new weights, and not be paused: nothing was under way there."""
    url = stack.enter_context(guarded(about.to_plain()))
    engine = VLLMServers([url], token=TOKEN, max_model_len=64)
    engine.start(qwen3_dir)
    stack.callback(engine.close)
    flight = Flight(StreamRequest("a", [5, 9], 3, 8), SamplingParams(max_tokens=8))
    (server,) = engine.connections.servers
    found = []

    def update(source: object, version: int) -> None:
        looking = asyncio.run_coroutine_threadsafe(engine._find_server(flight), engine.connections.loop)
        found.append(looking)
        with pytest.raises(TimeoutError):
            looking.result(0.5)
        server.state = STALE  # as one that is back in the middle
        with pytest.raises(TimeoutError):
            looking.result(0.5)
        server.state = READY

    with patch.object(engine, "_update", update):
        engine.update_weights(WeightSource.of_views(WeightViews([])), 1)
    assert found[0].result(10) is server


def test_what_a_rank_holds_is_looked_at_again_if_it_is_other_memory(stack, qwen3_dir):
    """Thousands of views cost a push milliseconds; those of memory that is gone would send old weights."""
    connections, sent = connect(stack, qwen3_dir), []
    views = [WeightView("a", torch.zeros(6, 4), (6, 4)), WeightView("b", torch.zeros(2, 3, 4), (6, 4))]

    def held(views: list[WeightView]) -> list[int]:
        push = connections.direct_sender(WeightSource.of_views(WeightViews(views, stays=True)))
        assert isinstance(push, DirectPush)
        tensors = push._ranks._held()
        sent.append(tensors)  # so that no address is used again
        assert [tensor.shape for tensor in tensors.values()] == [view.shape for view in views]
        return [part.view.data_ptr() for tensor in tensors.values() for part in tensor.parts]

    addresses = [view.view.data_ptr() for view in views]
    with patch.object(watching, "held_views", wraps=watching.held_views) as looked:
        assert held(views) == held(views) == addresses
        assert looked.call_count == 1
        moved = [views[0], replace(views[1], view=torch.ones(2, 3, 4))]
        assert held(moved) == [addresses[0], moved[1].view.data_ptr()]
        assert looked.call_count == 2
        connections.let_go()
        assert held(moved) == [addresses[0], moved[1].view.data_ptr()]
        assert looked.call_count == 3
        assert held([*moved, WeightView("c", torch.ones(3), (3,))])[2]


def test_weights_that_another_trainer_has_left_are_not_sampled_with(about, stack, qwen3_dir):
    """A trainer that does not reach its server for longer than its lease: another one has pushed its own there."""
    now = [0.0]
    answers = {"clock": lambda: now[0], "collective_rpc": {"results": []}}
    url = stack.enter_context(guarded(about.to_plain(), **answers))
    connections = connect(stack, qwen3_dir, url)
    connections.admit()
    (client,) = connections.servers
    connections.run(client.move("http://127.0.0.1:1"))
    until(lambda: client.state == LOST)
    now[0] += LEASE_S
    other = ServerClient(url, TOKEN, "another run", 5.0)

    async def push() -> None:
        await other.open()
        await other.take_lease()
        await other.call("join_trainer")
        other.state = READY
        await other.close()

    asyncio.run(push())
    connections.run(client.move(url))
    until(lambda: client.state != LOST)
    assert (client.state, client.pushed) == (STALE, None)


LAST = FIRST.replace("null", '"stop"')


def test_another_server_at_the_address_samples_nothing_before_it_has_weights(about, stack, qwen3_dir, monkeypatch):
    """A cluster may lead an address from one server to the next at once; what that says of itself takes its time."""
    engine = VLLMServers([stack.enter_context(guarded(about.to_plain()))], TOKEN, max_model_len=512)
    engine.start(qwen3_dir)
    stack.callback(engine.close)
    (client,), looked = engine.connections.servers, threading.Event()
    second = stack.enter_context(guarded(replace(about, instance="another").to_plain(), GENERATE, LAST))

    async def look(client: ServerClient) -> None:
        if client.url == second:  # it has given its lease
            looked.set()
            await asyncio.sleep(0.5)

    monkeypatch.setattr(ServerClient, "check_health", look)
    engine.connections.run(client.move(second))
    assert looked.wait(10)
    engine.submit([StreamRequest("a", [5, 6], 1, 10)], SamplingParams(max_tokens=10))
    with pytest.raises(WeightsLostError):
        engine.collect(10.0)
    assert engine.withdraw() == []
    assert (client.state, engine.num_restarts) == (STALE, 1)


def test_a_response_that_is_complete_is_kept_though_its_connection_ends_later(about, stack, qwen3_dir):
    """One with stop strings would begin anew elsewhere, if it were not complete."""
    url = stack.enter_context(guarded(about.to_plain(), "/inference/v1/generate", LAST))
    engine = VLLMServers([url], TOKEN, max_model_len=512)
    engine.start(qwen3_dir)
    stack.callback(engine.close)
    engine.submit([StreamRequest("a", [5, 6], 1, 10)], SamplingParams(max_tokens=10, stop=("x",)))
    (server,) = engine.connections.servers
    (flight,) = engine.connections.board.flights.values()
    until(lambda: flight.is_complete)
    engine.connections.lose(server, ServerLostError("it has ended"))
    until(lambda: server.load == 0)
    (news,) = engine.collect(0.0)
    assert (news.token_ids, news.finish_reason) == ([7], "stop")


def test_a_pool_is_busy_by_the_share_of_its_servers(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    servers = [ServerClient(f"http://node-{number}:1", TOKEN, "a run", 1.0) for number in range(4)]
    log = SpanLog()
    activity = PoolActivity(servers, log)
    for seconds, loads, num_tokens in ((5.0, [2, 0, 0, 0], 0), (3.0, [2, 1, 0, 0], 60), (8.0, [0, 0, 0, 0], 90)):
        now[0] += seconds
        for server, load in zip(servers, loads, strict=True):
            server.load = load
        activity.note(num_tokens)
    now[0] += 10.0
    activity.note()
    assert [(span.began, span.ended, span.busy, span.tokens) for span in log.since(0)[0]] == [
        (105.0, 108.0, 3.0 / 4, 60),
        (108.0, 116.0, 8.0 * 2 / 4, 90),
    ]


def test_a_message_may_bring_thousands_of_tokens(about, stack, qwen3_dir):
    """vLLM joins what it has not sent when the server, or the trainer, was held up for some seconds."""
    count, entry = 20_000, {"token": "token_id:7", "logprob": -1.0, "bytes": None, "top_logprobs": []}
    choice = {"token_ids": [7] * count, "logprobs": {"content": [entry] * count}, "finish_reason": "length"}
    message = f"data: {json.dumps({'choices': [choice]})}\n"
    plain = replace(about, max_model_len=2 * count).to_plain()
    engine = VLLMServers(
        [stack.enter_context(guarded(plain, GENERATE, message))], TOKEN, max_model_len=2 * count, call_timeout_s=60.0
    )
    engine.start(qwen3_dir)
    stack.callback(engine.close)
    ((response,),) = engine.generate([GenerationRequest([5, 6], 1)], SamplingParams(max_tokens=count))
    assert (len(response.token_ids), len(response.logprobs), response.finish_reason) == (count, count, "length")


@contextmanager
def no_weights_travel(load: Callable[[list[ServerClient]], list[ServerClient]]) -> Iterator[None]:
    """Updates in which nothing is sent; `load` returns the servers that have loaded it."""
    with (
        patch.object(CheckpointLayout, "check_source", lambda layout, source: source),
        patch.object(pool, "meet", lambda connections, servers, timeout_s: servers),
        patch.object(pool, "deliver", lambda connections, source, servers, *_: Deliveries(False, others=servers)),
        patch.object(pool, "send", lambda connections, source, servers, *_, record: (load(servers), 0, 0)),
        patch.object(ServerClient, "pause", lambda client, *, keep=False: asyncio.sleep(0)),
    ):
        yield


def test_servers_that_take_no_weights_are_not_sent_them_for_ever(about, stack, qwen3_dir):
    """Such as those without memory for them: each is back in seconds, and fails again."""
    engine = VLLMServers([stack.enter_context(guarded(about.to_plain()))], TOKEN, max_model_len=512, call_timeout_s=1.0)
    engine.start(qwen3_dir)
    stack.callback(engine.close)
    connections, weights = engine.connections, WeightSource.of_views(WeightViews([]))

    def load(servers: list[ServerClient]) -> list[ServerClient]:
        return connections.without(servers, dict.fromkeys(servers, ServerLostError("it is out of memory")))

    def push_again_and_again() -> None:
        began = time.monotonic()
        while time.monotonic() < began + 10:
            with suppress(WeightsLostError):
                engine.update_weights(weights, 5)

    with no_weights_travel(load), pytest.raises(RuntimeError, match=r"no server .* for 1 s .*it is out of memory"):
        push_again_and_again()
    with no_weights_travel(lambda servers: servers):
        engine.update_weights(weights, 6)
    with no_weights_travel(load), pytest.raises(WeightsLostError):  # anew
        engine.update_weights(weights, 7)


def test_a_server_that_missed_an_update_waits_for_weights_though_its_number_comes_again(about, stack, qwen3_dir):
    """Validation samples with other weights of a step, such as their average; another fit counts from 0."""
    urls = [stack.enter_context(guarded(replace(about, instance=name).to_plain())) for name in ("one", "two")]
    engine = VLLMServers(urls, TOKEN, max_model_len=512)
    engine.start(qwen3_dir)
    stack.callback(engine.close)
    connections, weights = engine.connections, WeightSource.of_views(WeightViews([]))
    there, missing = connections.servers
    reached = [there, missing]
    with no_weights_travel(lambda servers: [server for server in servers if server in reached]):
        engine.update_weights(weights, 5)
        reached.remove(missing)
        connections.lose(missing, ServerLostError("it is gone"))
        until(lambda: missing.state == READY)
        engine.update_weights(weights, 5)
    assert (there.state, missing.state) == (READY, STALE)
    connections.lose(missing, ServerLostError("it is gone"))
    until(lambda: missing.state != LOST)
    assert missing.state == STALE
