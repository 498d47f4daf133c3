"""vLLM servers that go, and come back: nothing is left of them, and no response is lost."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_megatron_rl.rollout.protocol import (
    GenerationRequest,
    SamplingParams,
    StreamMode,
    WeightsLostError,
)
from lightning_megatron_rl.rollout.servers.engine import VLLMServers
from tests.policing import leaked_memory, shared_memory
from tests.rollout.conftest import Harness, is_running, make_requests, max_logprob_error
from tests.rollout.server_process import ServerProcess, ask
from tests.rollout.test_servers import EIGHT, connect, wait_without_weights
from tests.rollout.test_streaming import EXACT, Collected, drawn, requests


def wait_for_tokens(engine: VLLMServers, number: int) -> None:
    """Wait until all responses have tokens, while a server has some of them under way."""
    server, board, deadline = engine.connections.servers[number], engine.connections.board, time.monotonic() + 60
    while not server.load or not all(flight.token_ids for flight in list(board.flights.values())):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_for_the_end(family: list[int]) -> None:
    """Wait until none of these processes is there."""
    deadline = time.monotonic() + 15
    while any(map(is_running, family)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.deadline(600)
@pytest.mark.parametrize("victim", ["serve", "api server"])
def test_nothing_is_left_of_a_killed_server(model_dir, tmp_path, victim):
    """vLLM's own leaves its engine core and workers as orphans."""
    before = shared_memory()
    started = ServerProcess(model_dir, tmp_path / "log")
    started.wait()
    family = started.family()
    assert len(family) >= 3
    os.kill(started.process.pid if victim == "serve" else family[0], signal.SIGKILL)
    started.process.wait(30)
    wait_for_the_end(family)
    assert leaked_memory(before) == []


@pytest.mark.slow
@pytest.mark.deadline(300)
def test_a_server_ends_with_its_engine_whatever_it_was_asked(model_dir, tmp_path):
    """vLLM's own waits for ever for the answer of an engine that is gone."""
    started = ServerProcess(model_dir, tmp_path / "log")
    started.wait()
    family = started.family()
    (core,) = [pid for pid in family if "EngineCore" in " ".join(psutil.Process(pid).cmdline())]
    os.kill(core, signal.SIGSTOP)
    who = {"body": {}, "x-run": "a-trainer"}
    assert ask(started.url, "/lease", **who)[0] == 200

    def ask_in_vain() -> None:
        with suppress(OSError):  # it ends without an answer
            ask(started.url, "/reset_prefix_cache", **who)

    asked = threading.Thread(target=ask_in_vain)
    asked.start()
    time.sleep(1)
    os.kill(core, signal.SIGKILL)
    assert started.process.wait(30) == 1  # it looks every 5 s, and waits as long for what is under way
    asked.join(30)
    assert not any(map(is_running, family))
    assert "has ended with" in started.log.read_text()


def describe(engine: VLLMServers) -> list[tuple[str, int]]:
    return [(server.state, server.load) for server in engine.connections.servers]


@pytest.mark.slow
@pytest.mark.deadline(1200)
def test_responses_of_a_lost_server_go_on_elsewhere_and_it_comes_back(model_dir, tmp_path):
    """Killed with responses on both: none is lost, each token is of the weights that were pushed."""
    servers = [ServerProcess(model_dir, tmp_path / f"{number}.log") for number in range(2)]
    for server in servers:
        server.wait()
    engine = connect(*servers)
    engine.stream_mode = StreamMode(background=True)
    engine.start(model_dir)
    harness = Harness(engine, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval())
    try:
        harness.push_random_weights(1)
        params, collected = SamplingParams(max_tokens=450, ignore_eos=True), Collected(harness)
        asked = requests(48, 450)  # how they are shared out is the engine's affair: both have some for seconds
        engine.submit(asked, params)
        collected.until(lambda: len(collected.responses) >= 6)
        assert [server.load > 0 for server in engine.connections.servers] == [True, True], describe(engine)
        servers[1].process.kill()
        killed = time.monotonic()
        collected.until(lambda: engine.num_restarts == 1)
        print(f"noticed after {time.monotonic() - killed:.2f} s")
        collected.until(lambda: collected.are_complete)
        for request in asked:
            response = collected.responses[request.name]
            assert len(response.token_ids) == 450
            expected = drawn(harness.model, request.token_ids, response.token_ids)
            assert (torch.tensor(response.logprobs) - expected).abs().max() < EXACT
        servers[1].start_again()
        wait_without_weights(engine, 1)
        harness.push_random_weights(2)
        assert [server.state for server in engine.connections.servers] == ["ready", "ready"]
        many = make_requests(24)
        assert max_logprob_error(harness.model, many, engine.generate(many, EIGHT)) < EXACT
        stops = SamplingParams(max_tokens=450, ignore_eos=True, stop=("no such text",))
        asked = [GenerationRequest(request.token_ids, request.seed) for request in asked]
        whole, api_server = engine.generate(asked, stops), servers[1].family()[0]
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(engine.generate, asked, stops)
            wait_for_tokens(engine, 1)
            os.kill(api_server, signal.SIGKILL)
            assert [of.token_ids for (of,) in again.result(200)] == [of.token_ids for (of,) in whole], "begun anew"
        assert engine.num_restarts == 2
    finally:
        engine.close()
        for server in servers:
            server.stop()


@pytest.mark.slow
@pytest.mark.deadline(1200)
def test_the_only_server_comes_back_without_weights(model_dir, tmp_path):
    """A batch is asked for again when the server has the newest weights."""
    server = ServerProcess(model_dir, tmp_path / "log")
    server.wait()
    engine = connect(server, call_timeout_s=400.0)
    engine.start(model_dir)
    harness = Harness(engine, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval())
    try:
        harness.push_random_weights(1)
        family = server.family()
        server.process.kill()
        server.process.wait(30)
        wait_for_the_end(family)  # until then the old one may answer
        server.start()
        asked = make_requests(2)
        with pytest.raises(WeightsLostError, match="call update_weights with a full set"):
            engine.generate(asked, EIGHT)
        harness.push_random_weights(2)
        assert max_logprob_error(harness.model, asked, engine.generate(asked, EIGHT)) < EXACT
    finally:
        engine.close()
        server.stop()
