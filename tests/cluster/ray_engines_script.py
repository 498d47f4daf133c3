"""A trainer's side of engines on Ray, of which one is lost in the middle; `python -m tests.cluster.ray_engines_script`.

What the test waits for are files below --out: `under_way`, `complete.json`, `again.json`. It ends when it is killed.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from lightning_megatron_rl.rollout.protocol import SamplingParams, StreamMode, WeightsLostError
from lightning_megatron_rl.rollout.servers.client import LOST
from lightning_megatron_rl.rollout.servers.ray_engines import RayEngines
from tests.rollout.conftest import Harness, make_requests, max_logprob_error
from tests.rollout.test_streaming import Collected, drawn, requests

TOKENS = 450
NUM_RESPONSES = 12
AGAIN_S = 420.0  # for a lost engine to be placed, and to load


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--vllm-args", type=json.loads, default={})
    options = parser.parse_args()

    engine = RayEngines(
        options.engines,
        device="cpu",
        max_model_len=512,
        kv_cache_memory_gb=0.25,
        num_threads=1,
        vllm_args=options.vllm_args,
        call_timeout_s=600.0,
    )
    engine.stream_mode = StreamMode(background=True)
    began = time.monotonic()
    engine.start(options.model)
    engine.wait_ready()
    print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
    clients = engine.connections.servers
    (options.out / "token").write_text(clients[0]._headers["Authorization"].removeprefix("Bearer "))
    harness = Harness(engine, AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval())
    harness.push_random_weights(1)
    params, asked, collected = (
        SamplingParams(max_tokens=TOKENS, ignore_eos=True),
        requests(NUM_RESPONSES, TOKENS),
        Collected(harness),
    )
    engine.submit(asked, params)
    collected.until(lambda: len(collected.responses) >= NUM_RESPONSES // 2)
    assert all(client.load > 0 for client in clients), [client.load for client in clients]
    urls = [client.url for client in clients]
    (options.out / "under_way").write_text("1")
    models = {harness.version: copy.deepcopy(harness.model)}

    def until(reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + AGAIN_S
        while not reached():
            assert time.monotonic() < deadline, [(client.url, client.state) for client in clients]
            try:
                collected.add(engine.collect(0.01, everything=True))
            except WeightsLostError:
                harness.push_random_weights(10 + harness.version)
                models[harness.version] = copy.deepcopy(harness.model)

    until(lambda: engine.num_restarts >= 1)
    noticed = time.time()
    (options.out / "noticed").write_text("1")
    until(lambda: collected.are_complete)
    errors, lengths, versions = [], [], set()
    for request in asked:
        response, at = collected.responses[request.name], 0
        for version, count in response.segments:
            expected = drawn(models[version], request.token_ids, response.token_ids)[at : at + count]
            errors.append((torch.tensor(response.logprobs[at : at + count]) - expected).abs().max().item())
            at += count
            versions.add(version)
        lengths.append(len(response.token_ids))
    complete = {"errors": errors, "lengths": lengths, "versions": sorted(versions), "noticed": noticed}
    write(options.out / "complete.json", complete | {"at": time.time()})

    deadline = time.monotonic() + AGAIN_S
    while any(client.state == LOST for client in clients):
        assert time.monotonic() < deadline, [(client.url, client.state) for client in clients]
        time.sleep(0.1)
    back = time.time()
    harness.push_random_weights(20)
    states = [client.state for client in clients]
    many = make_requests(24)
    error = max_logprob_error(harness.model, many, engine.generate(many, SamplingParams(max_tokens=40)))
    moved = sum(client.url != url for client, url in zip(clients, urls, strict=True))
    write(options.out / "again.json", {"back": back, "states": states, "error": error, "moved": moved})
    while True:
        time.sleep(1.0)


def write(path: Path, value: object) -> None:
    hidden = path.with_suffix(".part")
    hidden.write_text(json.dumps(value))
    hidden.rename(path)


if __name__ == "__main__":
    main()
