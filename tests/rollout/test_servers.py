"""vLLM servers as an engine: the samples of a local one, updates in the middle, and servers that are no use."""

import copy
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM

from lightning_megatron_rl.rollout.protocol import (
    GenerationRequest,
    SamplingParams,
    StreamMode,
    StreamRequest,
    WeightsLostError,
)
from lightning_megatron_rl.rollout.servers import pool, push
from lightning_megatron_rl.rollout.servers.client import ServerClient, ServerLostError
from lightning_megatron_rl.rollout.servers.engine import VLLMServers
from lightning_megatron_rl.rollout.servers.server_process import STREAM_INTERVAL
from lightning_megatron_rl.rollout.vllm.sockets import SOCKETS_VARIABLE
from lightning_megatron_rl.utilities.spans import SAMPLING
from lightning_megatron_rl.weights.source import WeightSource, WeightViews, source_of
from lightning_megatron_rl.weights.transports import direct
from tests.policing import keep_process
from tests.rollout.conftest import IM_END, Harness, is_running, make_requests, max_logprob_error, random_weights
from tests.rollout.server_process import TOKEN, ServerProcess, ask
from tests.rollout.test_streaming import EXACT, Collected, drawn, drawn_with_mixed_cache, requests

EIGHT = SamplingParams(max_tokens=40)
LONG = 400  # tokens of responses that an update comes in the middle of


def connect(*servers: ServerProcess, **settings: object) -> VLLMServers:
    options = {"max_model_len": 512, "start_timeout_s": 20.0, "call_timeout_s": 60.0, "token": TOKEN, **settings}
    return VLLMServers([server.url for server in servers], **options)


def wait_without_weights(engine: VLLMServers, number: int) -> None:
    """Wait until a server that was lost is back."""
    deadline = time.monotonic() + 60
    while engine.connections.servers[number].state != "without weights":
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def server(model_dir, tmp_path_factory) -> Iterator[ServerProcess]:
    """A running server; nothing of it is left at the end."""
    started = ServerProcess(model_dir, tmp_path_factory.mktemp("server") / "log")
    keep_process(started.process.pid)
    started.wait()
    family = started.family()
    sockets = Path(psutil.Process(family[0]).environ()[SOCKETS_VARIABLE])
    assert any(path.is_socket() for path in sockets.iterdir())
    yield started
    assert started.stop() == 128 + signal.SIGTERM
    assert not any(map(is_running, family))
    assert not sockets.exists(), "vLLM removes none of its sockets"


@pytest.fixture
def remote(server, model_dir) -> Iterator[Harness]:
    """An engine on the server, and the model with the weights that it has after the first push."""
    engine = connect(server)
    engine.stream_mode = StreamMode(background=True)
    engine.start(model_dir)
    harness = Harness(engine, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval())
    harness.push_random_weights(1)
    yield harness
    engine.close()


@pytest.fixture
def keeping(remote) -> Harness:
    """The same, and caches are kept at updates."""
    remote.engine.stream_mode = StreamMode(background=True, keeps_cache=True)
    return remote


def test_samples_are_those_of_a_local_engine_after_each_update(harness, remote):
    """The same tokens for the same seeds, and log-probs of the weights that were pushed last."""
    asked = make_requests(6, 4)
    for seed in range(40, 44):
        remote.push_random_weights(seed)
        harness.push_random_weights(seed)
        mine, theirs = (engine.generate(asked, EIGHT) for engine in (remote.engine, harness.engine))
        assert [[g.token_ids for g in group] for group in mine] == [[g.token_ids for g in group] for group in theirs]
        assert [[g.finish_reason for g in group] for group in mine] == [
            [g.finish_reason for g in group] for group in theirs
        ]
        assert max_logprob_error(remote.model, asked, mine) < EXACT


def test_weights_go_over_gloo_where_nccl_does_not_work(remote, monkeypatch, caplog):
    """Trainer and worker find it together when they meet, and say why.

    Meanwhile the server has no weights: over NCCL they go straight into the model, which may break off.
    """
    caplog.set_level("INFO")
    (server,), had, send = remote.engine.connections.servers, [], direct.RankEnd.send

    def spy(end: direct.RankEnd, held: Any) -> Any:
        had.append(server.pushed)
        return send(end, held)

    monkeypatch.setattr(direct.RankEnd, "send", spy)
    monkeypatch.setattr(push, "choose_backend", lambda connections, source: "nccl")
    for seed in (50, 51):
        remote.push_random_weights(seed)
        asked = make_requests(4)
        assert max_logprob_error(remote.model, asked, remote.engine.generate(asked, EIGHT)) < EXACT
    said = [record.message for record in caplog.records if "NCCL" in record.message]
    assert said == [
        "weights go to the server on 127.0.0.1 over gloo, since NCCL does not work:"
        " rank 0 of the replica: RuntimeError: its device is cpu"
    ]
    assert sum("straight from the ranks" in record.message for record in caplog.records) == 2
    assert had == [None, None]
    assert server.pushed == (server.about.instance, remote.version)


def test_only_a_server_that_samples_is_paused(remote, monkeypatch):
    """A pause takes vLLM 20 ms. One whose responses were cut may still be at them; then nothing is left to stop."""
    asked, ask = [], ServerClient._ask

    async def spy(client: ServerClient, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        asked.append(path.partition("?")[0])
        return await ask(client, method, path, *arguments, **options)

    def calls_of_a_push() -> list[str]:
        asked.clear()
        remote.push_random_weights(60 + remote.version)
        return [path for path in asked if path in ("/pause", "/reset_prefix_cache", "/resume")]

    monkeypatch.setattr(ServerClient, "_ask", spy)
    is_idle, is_busy = ["/reset_prefix_cache"], ["/pause", "/reset_prefix_cache", "/resume"]
    remote.engine.generate(make_requests(4), EIGHT)
    assert calls_of_a_push() == is_idle
    assert max_logprob_error(remote.model, make_requests(4), remote.engine.generate(make_requests(4), EIGHT)) < EXACT
    (server,) = remote.engine.connections.servers
    collected = Collected(remote)
    remote.engine.submit(requests(48, 400), SamplingParams(max_tokens=400, ignore_eos=True))
    collected.until(lambda: server.load == 48)  # so many are not done before the next call, on any machine
    assert calls_of_a_push() == is_busy
    collected.until(lambda: server.load > 0)
    remote.engine.withdraw()
    assert calls_of_a_push() == is_busy
    assert calls_of_a_push() == is_idle
    assert max_logprob_error(remote.model, make_requests(4), remote.engine.generate(make_requests(4), EIGHT)) < EXACT


def test_a_cache_that_could_not_be_dropped_is_dropped_before_anything_samples(remote, monkeypatch):
    """It is dropped while weights come, unless the server still has a response, of whoever it is."""
    asked, ask = [], ServerClient._ask

    async def refuse_once(client: ServerClient, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        asked.append(path.partition("?")[0])
        if asked[-1] == "/reset_prefix_cache" and asked.count("/reset_prefix_cache") == 1:
            return {"success": False}
        return await ask(client, method, path, *arguments, **options)

    cached = [GenerationRequest(list(range(5, 105)), seed=3)]  # whole blocks of the prompt are kept
    remote.engine.generate(cached, EIGHT)
    monkeypatch.setattr(ServerClient, "_ask", refuse_once)
    remote.push_random_weights(70)
    called = [path for path in asked if path in ("/pause", "/reset_prefix_cache", "/resume")]
    assert called == ["/reset_prefix_cache", "/pause", "/reset_prefix_cache", "/resume"]
    assert max_logprob_error(remote.model, cached, remote.engine.generate(cached, EIGHT)) < EXACT


def under_way(harness: Harness, asked: list[StreamRequest]) -> Collected:
    """Responses of which each has some tokens, beside others, with which they take seconds."""
    collected, beside = Collected(harness), requests(40, LONG, start=1000)
    harness.engine.submit([*asked, *beside], SamplingParams(max_tokens=LONG, ignore_eos=True))
    collected.until(lambda: collected.shortest >= 10 and len(collected.responses) == len(asked) + len(beside))
    return collected


def have_two_versions(collected: Collected, asked: list[StreamRequest]) -> bool:
    """Whether an update came in the middle of all: on a busy machine they may have come to their ends before it."""
    return all(len(collected.responses[request.name].segments) == 2 for request in asked)


def test_a_kept_cache_is_the_old_weights(keeping, monkeypatch):
    """Responses are frozen meanwhile, not asked for again. New ones find nothing of the old weights.

    The first message behind the update, of which some tokens were drawn before it, counts with those before.
    """
    harness, asked = keeping, requests(6, LONG)
    calls, ask = [], ServerClient._ask

    async def spy(client: ServerClient, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        calls.append(path)
        return await ask(client, method, path, *arguments, **options)

    long = StreamRequest("long", [6 + number % 90 for number in range(100)], 5, LONG)  # whole blocks
    asked.append(long)
    for seed in range(81, 86):
        old, collected = copy.deepcopy(harness.model), under_way(harness, asked)
        calls.clear()
        with monkeypatch.context() as patched, patch.object(ServerClient, "generate") as generated:
            patched.setattr(ServerClient, "_ask", spy)
            harness.push_random_weights(seed)
            assert not generated.called
        harness.engine.submit([StreamRequest("new", long.token_ids, 6, 10)], EIGHT)
        collected.until(lambda of=collected: of.are_complete and "new" in of.responses)
        if have_two_versions(collected, asked):
            break
    assert [path for path in calls if "pause" in path or "cache" in path] == ["/pause?mode=keep&clear_cache=false"]
    for request in asked:
        response = collected.responses[request.name]
        (first, num_old), (second, _) = response.segments
        assert (first, second, len(response.token_ids)) == (harness.version - 1, harness.version, LONG)
        found, errors = torch.tensor(response.logprobs), []
        under_old = drawn(old, request.token_ids, response.token_ids)
        for boundary in range(num_old - STREAM_INTERVAL, num_old + 1):
            mixed = drawn_with_mixed_cache(old, harness.model, request.token_ids, response.token_ids, boundary)
            expected = torch.cat([under_old[:boundary], mixed])
            errors.append((found - expected).abs().max().item())
        assert min(errors) < EXACT
        recomputed = drawn(harness.model, request.token_ids, response.token_ids)
        assert (found - recomputed)[num_old:].abs().max() > 0.01
    found = torch.tensor(collected.responses["new"].logprobs)
    expected = drawn(harness.model, long.token_ids, collected.responses["new"].token_ids)
    assert (found - expected).abs().max() < EXACT


def test_frozen_responses_of_a_server_that_is_lost_go_on(keeping, monkeypatch):
    """From their tokens, with the weights of the next update, when it is back."""
    harness, asked, meet = keeping, requests(4, LONG), pool.meet
    (server,) = harness.engine.connections.servers

    def lose(connections: Any, servers: list[ServerClient], timeout_s: float) -> list[ServerClient]:
        found = meet(connections, servers, timeout_s)
        connections.lose(server, ServerLostError("its host has gone"))
        return [one for one in found if one is not server]

    for seed in range(86, 96, 2):
        old, collected = copy.deepcopy(harness.model), under_way(harness, asked)
        with monkeypatch.context() as patched:
            patched.setattr(pool, "meet", lose)
            with pytest.raises(WeightsLostError):
                harness.push_random_weights(seed)
        wait_without_weights(harness.engine, 0)
        harness.push_random_weights(seed + 1)
        collected.until(lambda of=collected: of.are_complete)
        if have_two_versions(collected, asked):
            break
    for request in asked:
        response = collected.responses[request.name]
        assert len(response.token_ids) == LONG
        (_, num_old), (last, _) = response.segments
        assert last == harness.version
        found = torch.tensor(response.logprobs)
        assert (found - drawn(old, request.token_ids, response.token_ids))[:num_old].abs().max() < EXACT
        new = drawn(harness.model, request.token_ids, response.token_ids)
        assert (found - new)[num_old:].abs().max() < EXACT


def test_a_message_brings_several_tokens(remote, monkeypatch):
    """The first, eight at a time, and the rest; each costs both sides more than what is in it."""
    read, sizes = ServerClient._read, []

    def spy(client: ServerClient, line: bytes) -> Iterator[tuple[list[int], list[float], str | None]]:
        for told in read(client, line):
            sizes.append(len(told[0]))
            yield told

    monkeypatch.setattr(ServerClient, "_read", spy)
    asked = [GenerationRequest([5, 9, 7], seed=3)]
    ((response,),) = remote.engine.generate(asked, SamplingParams(max_tokens=100, ignore_eos=True))
    assert sum(sizes) == len(response.token_ids) == 100
    assert len(sizes) <= 1 + math.ceil(99 / STREAM_INTERVAL)
    assert max_logprob_error(remote.model, asked, [[response]]) < EXACT


def test_a_stop_string_ends_the_response(remote, tokenizer):
    """Also between two messages of a server."""
    asked = [GenerationRequest([5, 9, 7 + number], seed=3 + number) for number in range(8)]
    free = [one for (one,) in remote.engine.generate(asked, SamplingParams(max_tokens=40, ignore_eos=True))]
    for request, whole in zip(asked, free, strict=True):
        texts = [tokenizer.decode([token_id]) for token_id in whole.token_ids]
        stop = next(text for text in texts[request.seed :] if text.isalpha())
        params = SamplingParams(max_tokens=40, ignore_eos=True, stop=(stop,))
        ((stopped,),) = remote.engine.generate([request], params)
        count = texts.index(stop) + 1
        assert (stopped.token_ids, stopped.finish_reason) == (whole.token_ids[:count], "stop")
        assert stopped.logprobs == pytest.approx(whole.logprobs[:count], abs=EXACT)


def test_a_special_token_as_stop_string_ends_the_response(remote):
    asked = [GenerationRequest([5, 9, 7 + number], seed=3 + number) for number in range(8)]
    free = SamplingParams(temperature=2, max_tokens=100, ignore_eos=True)
    whole = [one.token_ids for (one,) in remote.engine.generate(asked, free)]
    ends = [token_ids.index(IM_END) + 1 if IM_END in token_ids else 100 for token_ids in whole]
    assert min(ends) < 100
    stopped = remote.engine.generate(asked, replace(free, stop=("<|im_end|>",)))
    assert [len(one.token_ids) for (one,) in stopped] == ends


def test_what_the_servers_did_is_known(remote):
    """Without it a stream's sampler counts as idle, and as having drawn nothing."""
    (server,) = remote.engine.connections.servers
    before, began, collected = len(remote.engine.activity.since(0)[0]), time.monotonic(), Collected(remote)
    remote.engine.submit(requests(4, 100), SamplingParams(max_tokens=100, ignore_eos=True))
    collected.until(lambda: len(collected.responses) == 4 and collected.are_complete)
    collected.until(lambda: server.load == 0)
    ended = time.monotonic()
    found = remote.engine.activity.within(SAMPLING, began, ended)
    assert 0 < found[0] <= ended - began
    assert found[1] == pytest.approx(400)  # a sum of shares of spans
    time.sleep(0.1)
    assert remote.engine.activity.within(SAMPLING, began, time.monotonic()) == found, "it is idle"
    remote.push_random_weights(90)
    assert {span.name for span in remote.engine.activity.since(before)[0]} == {SAMPLING, "update"}


def test_weights_are_held_until_they_may_move(remote):
    """Those that stay where they are until the engine is told to let go; others no longer than their update."""
    for stays in (True, False, True):
        weights = WeightViews.of(random_weights(remote.model, 60))
        storages = [StorageWeakRef(view.view.untyped_storage()) for view in weights.views]
        remote.version += 1
        remote.engine.update_weights(WeightSource.of_views(WeightViews(weights.views, stays=stays)), remote.version)
        del weights
        assert [storage.expired() for storage in storages] == [not stays] * len(storages)
        remote.engine.let_go()
        assert all(storage.expired() for storage in storages)


def test_tokens_behind_an_update_are_those_of_the_new_weights(remote):
    for attempt in range(5):  # on a busy machine the server may be done before the weights come
        old, asked, collected = copy.deepcopy(remote.model), requests(6, 400, start=6 * attempt), Collected(remote)
        remote.engine.submit(asked, SamplingParams(max_tokens=400, ignore_eos=True))
        collected.until(lambda of=collected: of.shortest >= 5 and len(of.responses) == 6)
        before = remote.version
        remote.push_random_weights(22 + attempt)
        collected.until(lambda of=collected: of.are_complete)
        if all(len(response.segments) == 2 for response in collected.responses.values()):
            break
    for request in asked:
        response = collected.responses[request.name]
        (first, num_old), (second, num_new) = response.segments
        assert (first, second) == (before, before + 1)
        assert num_old + num_new == len(response.token_ids) == 400
        found = torch.tensor(response.logprobs)
        under_old = drawn(old, request.token_ids, response.token_ids)
        under_new = drawn(remote.model, request.token_ids, response.token_ids)
        assert (found - under_old)[:num_old].abs().max() < EXACT
        assert (found - under_new)[num_old:].abs().max() < EXACT
        assert (under_old - under_new).abs().max() > 0.1


def test_what_a_server_has_drawn_is_kept_in_an_update(remote):
    """Of tokens that are drawn again an end would come too often: what has ended is sent at once, and stays."""
    counts: list[int] = []
    while len(counts) < 40:  # of eight responses that are drawn in step, and of five updates at least
        collected, number = Collected(remote), len(counts)
        remote.engine.submit(requests(8, 450, start=number), SamplingParams(max_tokens=450, ignore_eos=True))
        for seed in range(5):
            collected.until(lambda of=collected: of.shortest >= 5 and len(of.responses) == 8)
            time.sleep(0.1)
            remote.push_random_weights(30 + seed)
        collected.until(lambda of=collected: of.are_complete)
        assert all(len(response.token_ids) == 450 for response in collected.responses.values())
        counts += [count for response in collected.responses.values() for _, count in response.segments[:-1]]
    assert not all(count % STREAM_INTERVAL == 1 for count in counts), counts
    assert remote.engine.num_restarts == 0


def test_what_a_server_has_drawn_is_withdrawn(remote):
    """As in an update: a validation withdraws what is under way, which then goes on from what is known of it."""
    counts: list[int] = []
    for attempt in range(5):
        collected = Collected(remote)
        remote.engine.submit(requests(8, 450, start=attempt), SamplingParams(max_tokens=450, ignore_eos=True))
        collected.until(lambda of=collected: of.shortest >= 5 and len(of.responses) == 8)
        time.sleep(0.1)
        collected.add(remote.engine.withdraw())
        counts += [len(one.token_ids) for one in collected.responses.values() if one.finish_reason is None]
    assert not all(count % STREAM_INTERVAL == 1 for count in counts), counts
    ((after,),) = remote.engine.generate([GenerationRequest([5, 9, 7], seed=3)], EIGHT)  # the server samples on
    assert after.token_ids
    assert remote.engine.num_restarts == 0


def test_what_is_withdrawn_goes_on_from_its_tokens(remote):
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    for attempt in range(5):  # on a busy machine the server may be done before it is told to stop
        asked, collected = requests(3, 300, start=3 * attempt), Collected(remote)
        remote.engine.submit(asked, params)
        collected.until(lambda of=collected: of.shortest >= 5 and len(of.responses) == 3)
        collected.add(remote.engine.withdraw())
        if all(response.finish_reason is None for response in collected.responses.values()):
            break
    assert remote.engine.collect(0.0, everything=True) == []
    known = {name: len(response.token_ids) for name, response in collected.responses.items()}
    rest = [
        StreamRequest(r.name, r.token_ids + collected.responses[r.name].token_ids, r.seed + 1, 300 - known[r.name])
        for r in asked
    ]
    remote.engine.submit(rest, params)
    collected.until(lambda: collected.are_complete)
    for request in asked:
        response = collected.responses[request.name]
        assert len(response.token_ids) == 300
        expected = drawn(remote.model, request.token_ids, response.token_ids)
        assert (torch.tensor(response.logprobs) - expected).abs().max() < EXACT


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (GenerationRequest([5, 128], 1), "token id 128 at position 1 is outside the vocabulary of 128"),
        (GenerationRequest([5] * 500, 1), r"prompt \(500\) \+ max_tokens \(40\) = 540 > max_model_len \(512\)"),
        (GenerationRequest([], 1), "the prompt is empty"),
    ],
)
def test_bad_requests_are_not_sent(remote, request_, words):
    """A token beyond the vocabulary would kill the server."""
    with pytest.raises(ValueError, match=words):
        remote.engine.generate([request_], EIGHT)
    assert remote.engine.generate(make_requests(1), EIGHT)


def test_weights_of_another_shape_are_refused_and_change_nothing(remote):
    name, tensor = random_weights(remote.model, 7)[0]
    with pytest.raises(ValueError, match="has shape"):
        remote.engine.update_weights(source_of([(name, tensor[:-1])]), 99)
    remote.push_random_weights(8)
    asked = make_requests(2)
    assert max_logprob_error(remote.model, asked, remote.engine.generate(asked, EIGHT)) < EXACT


def test_two_trainers_at_one_server_are_refused(remote, server, model_dir):
    other = connect(server, start_timeout_s=1.0)
    with pytest.raises(ValueError, match=rf"another trainer's: \S+, process {os.getpid()}\."):
        other.start(model_dir)


def test_weights_of_an_earlier_trainer_are_not_sampled_with(remote, server, model_dir):
    remote.engine.close()
    engine = connect(server)
    engine.start(model_dir)
    with pytest.raises(WeightsLostError, match="no server has the weights of version 0"):
        engine.generate(make_requests(1), EIGHT)
    engine.close()


def test_another_model_is_refused(server, tied_model_dir):
    with pytest.raises(ValueError, match=r"has another model, \S+ \(\w+\), than the trainer's"):
        connect(server).start(tied_model_dir)


def test_more_tokens_than_the_server_takes_are_refused(server, model_dir):
    with pytest.raises(ValueError, match=r"takes prompt and response of 512 tokens together.*--max-model-len 600"):
        connect(server, max_model_len=600).start(model_dir)


def test_no_route_of_the_server_is_open(server):
    for path in ("/health", "/metrics", "/about", "/pause", "/collective_rpc", "/v1/models", "/docs", "/openapi.json"):
        assert ask(server.url, path, token=None)[0] == 401, path
        assert ask(server.url, path, token="wrong-token-0123456789")[0] == 401, path
    for path in ("/v1/models", "/is_paused", "/docs", "/openapi.json", "/server_info", "/v1/chat/completions"):
        assert ask(server.url, path)[0] == 404, path
    for path in ("/pause", "/collective_rpc", "/inference/v1/generate"):
        assert ask(server.url, path, body={"method": "leave_trainer"})[0] == 409, path
