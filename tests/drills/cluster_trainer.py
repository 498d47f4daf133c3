"""A trainer's side of the drills of servers: it does what files below --out order, and answers in files there.

Orders: ``push`` new weights; ``batch`` of responses, with the time at which each got tokens, while something happens.
"""

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from lightning_megatron_rl.rollout.protocol import SamplingParams, StreamMode
from lightning_megatron_rl.rollout.servers.engine import VLLMServers
from tests.rollout.conftest import Harness
from tests.rollout.test_streaming import drawn, requests

TOKENS = 450
NUM_RESPONSES = 12
STALLED_S = 180.0  # without a token of any response


class Watch:
    """One batch: when tokens came, and when servers changed."""

    def __init__(self, harness: Harness) -> None:
        self.engine: Any = harness.engine
        self.harness = harness
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.came: dict[str, list[float]] = {}  # times at which there were more tokens
        self.ends: list[str] = []  # names, as often as they were told to be complete
        self.states: list[list[tuple[float, str]]] = [[] for _ in self.engine.connections.servers]

    def look(self) -> None:
        news = self.engine.collect(0.02, everything=True)
        now = time.time()
        for told in news:
            self.tokens.setdefault(told.name, []).extend(told.token_ids)
            self.logprobs.setdefault(told.name, []).extend(told.logprobs)
            if told.token_ids:
                self.came.setdefault(told.name, []).append(now)
            if told.finish_reason is not None:
                self.ends.append(told.name)
        for seen, server in zip(self.states, self.engine.connections.servers, strict=True):
            if not seen or seen[-1][1] != server.state:
                seen.append((now, server.state))

    def run(self, began: Path) -> dict[str, Any]:
        """Sample a batch to its end; `began` appears when every server is at work on it."""
        asked = requests(NUM_RESPONSES, TOKENS)
        ready = [server for server in self.engine.connections.servers if server.state == "ready"]
        self.engine.submit(asked, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        while len(self.came) < NUM_RESPONSES:
            self.look()
        assert all(server.load for server in ready), [server.load for server in ready]
        write(began, {"at": time.time()})
        while len(set(self.ends)) < NUM_RESPONSES:
            self.look()
            assert time.time() - max(times[-1] for times in self.came.values()) < STALLED_S, "nothing comes any more"
        error = 0.0
        for request in asked:
            expected = drawn(self.harness.model, request.token_ids, self.tokens[request.name])
            error = max(error, (torch.tensor(self.logprobs[request.name]) - expected).abs().max().item())
        return {
            "asked": [request.name for request in asked],
            "ends": self.ends,
            "lengths": [len(self.tokens[request.name]) for request in asked],
            "came": self.came,
            "states": self.states,
            "error": error,
        }


def write(path: Path, value: object) -> None:
    hidden = path.with_suffix(".part")
    hidden.write_text(json.dumps(value))
    hidden.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--urls", nargs="+", required=True)
    parser.add_argument("--start-timeout-s", type=float, default=240.0)
    options = parser.parse_args()
    engine = VLLMServers(options.urls, max_model_len=512, start_timeout_s=options.start_timeout_s, call_timeout_s=120.0)
    engine.stream_mode = StreamMode(background=True)
    began = time.time()
    try:
        engine.start(options.model)
    except (ValueError, RuntimeError) as error:
        write(options.out / "refused.json", {"seconds": time.time() - began, "error": str(error)})
        return
    harness = Harness(engine, AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval())
    harness.push_random_weights(1)
    write(options.out / "ready.json", {"at": time.time()})
    for number in itertools.count(1):
        order = options.out / f"{number}.order"
        while not order.exists():
            time.sleep(0.05)
        if order.read_text() == "batch":
            told = Watch(harness).run(options.out / f"{number}.began")
        else:
            began = time.monotonic()
            harness.push_random_weights(number + 1)
            seconds = time.monotonic() - began
            told = {
                "seconds": seconds,
                "states": [server.state for server in engine.connections.servers],
                "at": time.time(),
            }
        write(options.out / f"{number}.json", told)


if __name__ == "__main__":
    main()
