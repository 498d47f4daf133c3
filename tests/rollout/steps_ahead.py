"""Run by test_steps_ahead: a stream of a vLLM that begins a step before it has the tokens of the last one."""

import json
import os
import sys
from collections import deque
from typing import Any

from lightning_megatron_rl.rollout.protocol import SamplingParams, StreamRequest
from lightning_megatron_rl.rollout.vllm.settings import engine_environment
from lightning_megatron_rl.rollout.vllm.step_loop import StepLoop
from lightning_megatron_rl.utilities.spans import SpanLog


def main(model: str) -> None:
    """Print how many steps were begun ahead around `settle`, and the versions and tokens of two responses."""
    from vllm import LLM

    arguments: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 2**26}
    llm = LLM(model, dtype="float32", enforce_eager=True, logprobs_mode="processed_logprobs", **arguments)
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    # what vLLM does on a GPU: on a CPU it turns that off, but the queue is there for pipelines
    core.batch_queue_size, core.batch_queue = 2, deque(maxlen=2)
    core.step_fn = core.step_with_batch_queue
    loop = StepLoop(llm, keeps_cache=True, activity=SpanLog(0.0))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    loop.submit([StreamRequest(name, [5, 6, 7], seed, 12) for name, seed in (("a", 1), ("b", 2))], params, 0)
    for _ in range(5):
        loop.step(0)
    ahead = len(core.batch_queue)
    loop.settle(0)
    left = len(core.batch_queue)
    loop.forget_cache(0)  # as an update of the weights does
    drawn: dict[str, list[list[int]]] = {}
    for version in (0, 1):  # what was noted before counts as version 0
        for news in loop.collect(60.0 * version, version, everything=True):
            drawn.setdefault(news.name, []).extend(map(list, news.segments))
    print(json.dumps({"ahead": ahead, "left": left, "drawn": drawn}))


if __name__ == "__main__":
    os.environ |= engine_environment("cpu", ["Qwen3ForCausalLM"], eager=True, num_threads=1)
    main(sys.argv[1])
