"""Weights straight from ranks to the workers of real servers: what comes, how much of it, and servers that go."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_megatron_rl.rollout.protocol import Generation, SyncReport
from lightning_megatron_rl.rollout.servers import pool, push
from lightning_megatron_rl.rollout.servers.engine import VLLMServers
from lightning_megatron_rl.weights.send_buffers import SendBuffers
from lightning_megatron_rl.weights.source import source_of
from lightning_megatron_rl.weights.transports import direct
from tests.policing import keep_process
from tests.rollout.conftest import Harness, make_requests, max_logprob_error, random_weights
from tests.rollout.server_process import TOKEN, ServerProcess
from tests.rollout.test_servers import EIGHT, connect, wait_without_weights
from tests.weights.test_sharded_views import count_calls, exported, train

EXACT = 1e-5  # nats, fp32: sums in another order
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}


@dataclass
class Ranked:
    """What one rank of a trainer saw."""

    reports: list[SyncReport] = field(default_factory=list)
    calls: list[Counter[str]] = field(default_factory=list)  # of each push
    sent: list[int] = field(default_factory=list)  # bytes by this rank, in each direct push
    held: int = 0  # bytes of this rank's parameters
    weights: list[tuple[str, Tensor]] = field(default_factory=list)  # that were pushed last
    sampled: list[list[Generation]] = field(default_factory=list)


@pytest.fixture(scope="module")
def two_workers(model_dir, tmp_path_factory) -> Iterator[ServerProcess]:
    """A server whose model is split between two workers."""
    started = ServerProcess(model_dir, tmp_path_factory.mktemp("server") / "log", "--tensor-parallel-size", "2")
    keep_process(started.process.pid)
    started.wait()
    yield started
    started.stop()


@torch.no_grad()
def change(policy: Any) -> None:
    """Give every weight another number, copies the same, of about the same size."""
    for parameter in policy.model.parameters():
        parameter.add_(parameter.sin(), alpha=0.05)


def push_often(model: Path, strategy: dict[str, Any], url: str) -> Ranked:
    """Push four times, the first in buckets, and sample."""
    from lightning_megatron_rl.modules.sampling import Sampler

    policy = train(model, strategy, 2, precision="32-true")
    replica, engine, found = policy.strategy.replica, VLLMServers([url], TOKEN, max_model_len=512), Ranked()
    replica.run_on_leader(lambda: engine.start(model))
    sampler = Sampler(policy, engine)
    send = direct.RankEnd.send

    def spy(self: direct.RankEnd, held: Any) -> Any:
        came = send(self, held)
        found.sent.append(sum(came[0]))
        return came

    for version in range(1, 5):
        change(policy)

        def run(version: int = version) -> None:
            found.reports.append(sampler._push(policy.weights_to_push(direct=engine.takes_direct), version))

        with mock.patch.object(direct.RankEnd, "send", spy):
            found.calls.append(count_calls(policy, run))
    found.held = sum(parameter.nbytes for parameter in policy.model.parameters())
    found.weights = exported(policy)
    found.sampled = replica.run_on_leader(lambda: engine.generate(make_requests(6, 2), EIGHT))
    replica.run_on_leader(engine.close)
    return found


@pytest.mark.deadline(600)
@pytest.mark.slow  # a server of its own; test_servers.py pushes straight to one worker
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_two_ranks_send_two_workers_what_each_loads(worker_pool, two_workers, harness, model_dir, layout):
    ranks = worker_pool.run(
        push_often, model_dir, LAYOUTS[layout], two_workers.url, world_size=2, init_process_group=False
    )
    weights = ranks[0].weights
    asked, sampled = make_requests(6, 2), ranks[0].sampled
    at_start = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    assert max_logprob_error(at_start, asked, sampled) > 100 * EXACT
    harness.model.load_state_dict(dict(weights))
    assert max_logprob_error(harness.model, asked, sampled) < EXACT
    harness.version += 1
    harness.engine.update_weights(source_of(weights), harness.version)
    local = harness.engine.generate(asked, EIGHT)
    for mine, theirs in zip(chain(*sampled), chain(*local), strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=EXACT)

    matrices = sum(tensor.nbytes for _, tensor in weights if tensor.ndim > 1)
    vectors = sum(tensor.nbytes for _, tensor in weights if tensor.ndim == 1)
    first, *others = ranks[0].reports
    assert first.direct is None
    for report in others:
        assert report.direct is not None
        assert report.direct.worker_bytes == matrices // 2 + vectors
        assert report.direct.num_bytes == matrices + 2 * vectors
        assert report.num_bytes == matrices + vectors
        assert report.direct.link_share > 0
    for rank in ranks:
        assert rank.calls[0]["broadcast"] > 0
        # no rank has had more than what is its own: nothing is put together
        assert all(not calls.keys() - {"broadcast_object_list", "all_gather_object"} for calls in rank.calls[1:])
        assert len(rank.sent) == 3
        assert max(rank.sent) <= rank.held + vectors  # which both workers read
    assert sum(rank.sent[0] for rank in ranks) == matrices + 2 * vectors


# ---- servers that go in the middle


@pytest.fixture
def two_servers(model_dir, tmp_path) -> Iterator[list[ServerProcess]]:
    servers = [ServerProcess(model_dir, tmp_path / f"{number}.log") for number in range(2)]
    for server in servers:
        server.wait()
    yield servers
    for server in servers:
        for process in [psutil.Process(pid) for pid in server.family()]:
            process.resume()
        server.stop()


@pytest.mark.slow
@pytest.mark.deadline(1200)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_that_goes_in_the_middle_holds_nobody_up(two_servers, model_dir, monkeypatch, how):
    """The other server has the new weights; the one that comes back gets buckets, then messages again."""
    monkeypatch.setattr(pool, "_MIB", 4096)  # so that there are many messages
    monkeypatch.setattr(push, "MEET_S", 5.0)
    engine = connect(*two_servers, bucket_mb=1)
    engine.start(model_dir)
    harness = Harness(engine, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval())

    def update(seed: int) -> SyncReport:
        harness.version += 1
        return engine.update_weights(source_of(random_weights(harness.model, seed)), harness.version)

    try:
        assert update(1).direct is None
        assert update(2).direct is not None
        pack, count = SendBuffers.pack, 0

        def pack_and_kill(*arguments: Any) -> Tensor:
            nonlocal count
            count += 1
            if count == 20:
                os.kill(two_servers[1].engine_core(), how)
            return pack(*arguments)

        began = time.monotonic()
        with mock.patch.object(SendBuffers, "pack", pack_and_kill):
            report = update(3)
        seconds = time.monotonic() - began
        print(f"{how.name}: {seconds:.2f} s, {count} messages")
        assert seconds < 15  # a deadline of 5 s, and twice that for a busy machine
        assert report.direct is not None
        assert [server.state for server in engine.connections.servers] == ["ready", "lost"]
        asked = make_requests(4)
        assert max_logprob_error(harness.model, asked, engine.generate(asked, EIGHT)) < EXACT
        if how == signal.SIGSTOP:
            os.kill(two_servers[1].engine_core(), signal.SIGCONT)
        else:
            two_servers[1].start_again()
        wait_without_weights(engine, 1)
        sizes = [update(seed).direct for seed in (4, 5)]
        assert [server.state for server in engine.connections.servers] == ["ready", "ready"]
        assert all(size is not None for size in sizes)
        assert sizes[1].num_bytes == 2 * sizes[0].num_bytes  # to one server, then to both
        many = make_requests(24)
        assert max_logprob_error(harness.model, many, engine.generate(many, EIGHT)) < EXACT
    finally:
        engine.close()
