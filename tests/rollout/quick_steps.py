"""Run by test_quick_steps and tests/gpu: vLLM's own steps, and those of the same vLLM with `quicken`, compared."""

import copy
import json
import os
import sys
from collections import Counter, deque
from typing import Any

from lightning_megatron_rl.compat.vllm_steps import quicken
from lightning_megatron_rl.rollout.vllm.settings import engine_environment
from lightning_megatron_rl.rollout.vllm.step_loop import vllm_params
from tests.rollout.quick_plans import compare, told

PROMPTS = 12
GENERATIONS = 3
BLOCK = 16


def main(model: str, device: str, more: dict[str, Any]) -> None:
    """Print what is the same with some settings more, and how often what was done.

    "ahead" makes vLLM begin a step before it has the tokens of the last one, as it does on a GPU of itself; "fuzzed"
    compares schedulers alone, so many times.
    """
    import vllm

    own: dict[str, Any] = {"dtype": "float32" if device == "cpu" else "bfloat16", "enforce_eager": device == "cpu"}
    own |= {"max_model_len": 160, "max_num_seqs": 16, "block_size": BLOCK, "num_gpu_blocks_override": 40}
    own |= {"kv_cache_memory_bytes": 2**26, "logprobs_mode": "processed_logprobs", "enable_prefix_caching": True}
    if device == "cuda":
        own["gpu_memory_utilization"] = 0.05  # what has to be free, where other tests use the GPU as well
    is_ahead, fuzzed = more.pop("ahead", False), more.pop("fuzzed", 0)
    llm = vllm.LLM(model, **own | more)
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    if is_ahead:
        core.batch_queue_size, core.batch_queue = 2, deque(maxlen=2)
        core.step_fn = core.step_with_batch_queue
    if fuzzed:
        kinds = [(asynchronous, newer) for asynchronous in (False, True) for newer in (False, True)]
        quick = [
            compare(core, seed, asynchronous=one, newer_runner=two) for seed in range(fuzzed) for one, two in kinds
        ]
        print(json.dumps({"quick_plans": quick}))
        return
    scheduler = core.scheduler
    done = Counter[str]()
    count_calls(scheduler, "_preempt_request", "preempted", done)
    count_calls(scheduler.kv_cache_manager, "allocate_slots", "asked", done)
    plain, plain_plans = responses(llm, scheduler)
    cached, before = hashes(scheduler), dict(done)
    llm.reset_prefix_cache()
    is_quick = quicken(llm)
    count_handed_on(scheduler, done)
    quick, quick_plans = responses(llm, scheduler)
    different = [step for step, plan in enumerate(plain_plans) if [plan] != quick_plans[step : step + 1]]
    found = {
        "scheduler": type(scheduler).__name__,
        "quick": is_quick,
        "tokens": sum(len(response[0]) for response in plain),
        "different_responses": sum(map(list.__ne__, plain, quick)),
        "plans": len(plain_plans),
        "different_plan": different[0] if different else None,
        "same_number_of_plans": len(plain_plans) == len(quick_plans),
        "same_cache": cached == hashes(scheduler),
        "cached": len(cached),
        "preempted": before.get("preempted", 0),
        "asked_before": before["asked"],
        "asked": done["asked"] - before["asked"],
        "handed_on": done["handed_on"],
    }
    print(json.dumps(found))


def count_calls(owner: Any, name: str, kind: str, done: Counter[str]) -> None:
    """Count the calls of a method."""
    plain = getattr(owner, name)

    def counted(*values: Any, **named: Any) -> Any:
        done[kind] += 1
        return plain(*values, **named)

    setattr(owner, name, counted)


def count_handed_on(scheduler: Any, done: Counter[str]) -> None:
    """Count the tokens that the scheduler hands on, rather than to note them itself."""
    update = scheduler.update_from_output

    def counted(*values: Any) -> Any:
        outputs = update(*values)
        done["handed_on"] += sum(len(one.new_token_ids) for group in outputs.values() for one in group.outputs)
        return outputs

    scheduler.update_from_output = counted


def responses(llm: Any, scheduler: Any) -> tuple[list[list[Any]], list[Any]]:
    """Sample: prompts of 1 to 45 tokens, and responses of different lengths; the last ones end with a full block.

    Return them, and what was planned for each step.
    """
    from lightning_megatron_rl.rollout.protocol import SamplingParams

    params = SamplingParams(max_tokens=100, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5 + (7 * place) % 40 for place in range(1 + 4 * k)]} for k in range(PROMPTS)]
    own = [vllm_params(params, n=GENERATIONS, seed=k, max_tokens=1 + 9 * k) for k in range(PROMPTS)]
    texts = [*own[:-1], own[-1].clone()]
    texts[-1].detokenize = True  # as with a stop string: log-probs are kept with the tokens' texts
    plans: list[Any] = []
    plain = scheduler.schedule

    def schedule(*values: Any) -> Any:
        planned = plain(*values)
        plans.append(copy.deepcopy(in_numbers(told(planned)) | {"running": counts(scheduler)}))
        return planned

    scheduler.schedule = schedule
    found = [sample for output in llm.generate(prompts, texts, use_tqdm=False) for sample in output.outputs]
    scheduler.schedule = plain
    sampled = [
        [
            list(one.token_ids),
            list(one.logprobs.token_ids),
            list(one.logprobs.logprobs),
            list(one.logprobs.ranks),
            one.logprobs.start_indices,
            one.logprobs.end_indices,
            one.logprobs.decoded_tokens,
            one.cumulative_logprob,
            one.finish_reason,
        ]
        for one in found
    ]
    return sampled, in_order(plans)


def in_numbers(plan: dict[str, Any]) -> dict[str, Any]:
    """Put numbers of blocks in place of the blocks, which depend on what was free."""
    new = [(name, len(blocks[0]), *more) for name, blocks, *more in plan["new"]]
    given = [blocks and [len(group) for group in blocks] for blocks in plan["new_block_ids"]]
    return plan | {"new": new, "new_block_ids": given}


def counts(scheduler: Any) -> dict[str, list[int]]:
    """Return the tokens of what is under way: computed, begun, and not handed on."""
    return {
        one.request_id: [one.num_computed_tokens, one.num_in_flight_tokens, one.num_output_placeholders]
        for one in scheduler.running
    }


def in_order(plans: list[Any]) -> list[str]:
    """Return plans as text, in which responses have numbers in the order in which they came."""
    names: dict[str, str] = {}
    for plan in plans:
        for name, *_ in plan["new"]:
            names.setdefault(name, f"r{len(names)}")

    def renamed(value: Any) -> Any:
        if isinstance(value, str):
            return names.get(value, value)
        if isinstance(value, dict):
            return {renamed(key): renamed(one) for key, one in value.items()}
        if isinstance(value, set):
            return sorted(names[one] for one in value if one in names)  # others ended in an earlier run
        return [renamed(one) for one in value] if isinstance(value, list | tuple) else value

    return [json.dumps(renamed(plan), default=str) for plan in plans]


def hashes(scheduler: Any) -> list[str]:
    """Return the hashes of the blocks that the prefix cache has."""
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    return sorted(block.block_hash.hex() for block in blocks if block.block_hash is not None)


if __name__ == "__main__":
    on_cpu = sys.argv[2] == "cpu"
    os.environ |= engine_environment(sys.argv[2], ["Qwen3ForCausalLM"], eager=on_cpu, num_threads=1 if on_cpu else None)
    for settings in json.loads(sys.argv[3]):
        main(sys.argv[1], sys.argv[2], settings)
