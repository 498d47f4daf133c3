"""Two schedulers of vLLM, one of them made quick (`compat/vllm_*`), that are told the same: plans, outputs and caches.

A model is not needed: tokens follow from names and lengths. So there is room for everything that happens to a stream:
prompts in parts, responses that end, are withdrawn or put off, a cache that is reset, a scheduler that is held.
"""

import dataclasses
import random
from collections import deque
from contextlib import nullcontext
from typing import Any

import numpy as np

from lightning_megatron_rl.compat.vllm_cache import cached_blocks_alone
from lightning_megatron_rl.compat.vllm_steps import quicken_scheduler
from lightning_megatron_rl.rollout.protocol import SamplingParams
from lightning_megatron_rl.rollout.vllm.step_loop import vllm_params

STEPS = 400
STOP = 7  # a token that ends a response
VOCABULARY = 60


def compare(core: Any, seed: int, *, asynchronous: bool, newer_runner: bool) -> tuple[int, int]:
    """Tell both the same for some hundred steps; return how many were planned, and how many tokens taken, quickly.

    Args:
        core: vLLM's, whose settings the schedulers have.
        seed: Of what happens.
        asynchronous: Steps are planned before the tokens of the last one are there.
        newer_runner: Plans are for vLLM's newer model runner.

    Raises:
        AssertionError: They differ.
    """
    both = [Told(core, asynchronous, newer_runner) for _ in range(2)]
    assert quicken_scheduler(both[1].scheduler, both[1].notes)
    both[1].is_quick = True
    plain_plans = count_plain_plans(both[1].scheduler)
    chance, quiet, happens = random.Random(seed), 0, None
    for step in range(STEPS):
        if quiet := max(quiet - 1, 0):
            happens = None  # most steps only decode
        else:
            happens = (
                "go on" if happens == "hold" else chance.choice(["add", "add", "add", "withdraw", "reset", "hold"])
            )
            quiet = 0 if happens == "hold" else chance.choice([0, 1, 3, 10, 30])
        number = chance.randrange(1 << 30)
        answers = [one.happen(happens, number) for one in both]
        assert answers[0] == answers[1], (seed, step, happens)
        plans, outputs = zip(*(one.step() for one in both), strict=True)
        assert plans[0] == plans[1], (seed, step, happens, plans)
        assert outputs[0] == outputs[1], (seed, step, happens, outputs)
        assert both[0].state() == both[1].state(), (seed, step, happens)
    return both[1].num_plans - plain_plans[0], both[1].num_noted


def count_plain_plans(scheduler: Any) -> list[int]:
    """Count what is planned by vLLM's own function, which the quick one falls back to."""
    count, quick = [0], scheduler.schedule.__self__
    plain = quick._plain

    def counted(*values: Any) -> Any:
        count[0] += 1
        return plain(*values)

    quick._plain = counted
    return count


class Told:
    """A scheduler, and what stands for the model."""

    def __init__(self, core: Any, asynchronous: bool, newer_runner: bool) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        had = core.scheduler
        self.scheduler: Any = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=had.vllm_config,
            kv_cache_config=had.kv_cache_config,
            structured_output_manager=core.structured_output_manager,
            include_finished_set=False,
            log_stats=False,
            block_size=had.block_size,
            hash_block_size=had.hash_block_size,
        )
        self.scheduler.use_v2_model_runner = newer_runner
        self.hasher = core.request_block_hasher
        self.is_quick = False
        self.depth = 2 if asynchronous else 1
        self.begun: deque[tuple[Any, Any]] = deque()
        self.num_requests = self.num_plans = self.num_noted = 0
        self.noted: list[Any] = []  # in a step

    def notes(self, name: str) -> Any:
        """Return what notes the tokens of a response; some are handed on instead."""
        if int(name) % 5 == 0:
            return None
        return lambda token, *row: self.noted.append((name, [token], None, None, [row], False))

    def happen(self, what: str | None, number: int) -> Any:
        """Do something beside a step; return what came of it."""
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.request import RequestStatus

        chance, scheduler = random.Random(number), self.scheduler
        if what == "add":
            for _ in range(chance.choice([1, 4, 12])):
                scheduler.add_request(self.request(chance))
        elif what == "withdraw" and scheduler.requests:
            names = chance.sample(sorted(scheduler.requests), min(3, len(scheduler.requests)))
            return [one.request_id for one in scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)]
        elif what == "reset":
            with cached_blocks_alone(scheduler) if self.is_quick else nullcontext():
                return scheduler.reset_prefix_cache(reset_running_requests=chance.random() < 0.5)
        elif what in ("hold", "go on"):
            scheduler.set_pause_state(PauseState.PAUSED_ALL if what == "hold" else PauseState.UNPAUSED)
        return None

    def request(self, chance: random.Random) -> Any:
        """Make a request: prompts are alike now and then, and may be longer than a step has room for."""
        from vllm.v1.request import Request

        self.num_requests += 1
        start, length = chance.choice([0, 0, 1, 2]), chance.choice([1, 15, 16, 17, 40, 70, 120])
        params = vllm_params(SamplingParams(max_tokens=chance.randint(1, 80)), seed=1, stop_token_ids=[STOP])
        params.max_tokens = chance.randint(1, 80)
        return Request(
            request_id=f"{self.num_requests}",
            prompt_token_ids=[(start + 3 * place) % VOCABULARY for place in range(length)],
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(self.num_requests),
            block_hasher=self.hasher,
        )

    def step(self) -> tuple[Any, Any]:
        """Plan a step, and take the tokens of the oldest one that is begun; return both as plain values."""
        plan = None
        if self.scheduler.has_requests():
            planned = self.scheduler.schedule()
            self.num_plans += 1
            plan = told(planned)
            self.begun.append((planned, self.output(planned)))
        if not self.begun or (plan and plan["total_num_scheduled_tokens"] and len(self.begun) < self.depth):
            return plan, None
        outputs = self.scheduler.update_from_output(*self.begun.popleft())
        handed_on = [
            (
                one.request_id,
                one.new_token_ids,
                one.finish_reason,
                one.stop_reason,
                rows(one.new_logprobs),
                one.prefill_stats is not None,
            )
            for group in outputs.values()
            for one in group.outputs
        ]
        self.num_noted += len(self.noted)
        noted, self.noted = self.noted, []
        return plan, sorted(handed_on + noted, key=lambda one: int(one[0]))

    def output(self, planned: Any) -> Any:
        """Return tokens of what is no part of a prompt: by the response's name and its length."""
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        names = list(planned.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        drawn = [(31 * int(one.request_id) + 17 * one.num_computed_tokens) % VOCABULARY for one in requests]
        ids = np.array(drawn, dtype=np.int64).reshape(-1, 1)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[
                [] if request.is_prefill_chunk else [token] for request, token in zip(requests, drawn, strict=True)
            ],
            logprobs=LogprobsLists(ids, -ids.astype(np.float32) / 3, ids[:, 0] + 1) if names else None,
        )

    def state(self) -> Any:
        """Return what the scheduler knows of responses and of the cache."""
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        (single,) = scheduler.kv_cache_manager.coordinator.single_type_managers
        requests = {
            name: (
                str(one.status),
                list(one.all_token_ids),
                one.num_computed_tokens,
                one.num_in_flight_tokens,
                one.num_output_placeholders,
                one.async_tokens_to_discard,
                one.is_prefill_chunk,
                len(one.block_hashes),
            )
            for name, one in scheduler.requests.items()
        }
        return (
            requests,
            [one.request_id for one in scheduler.running],
            [one.request_id for one in scheduler.waiting],
            [(block.block_hash, block.ref_cnt) for block in pool.blocks],
            [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            {name: [block.block_id for block in blocks] for name, blocks in single.req_to_blocks.items() if blocks},
            dict(single.num_cached_block),
            (scheduler.current_step, scheduler.prefill_capacity_bound, sorted(scheduler.prev_step_scheduled_req_ids)),
        )


def told(planned: Any) -> dict[str, Any]:
    """Return what a plan says."""
    values = {field.name: getattr(planned, field.name) for field in dataclasses.fields(planned)}
    cached, new = values.pop("scheduled_cached_reqs"), values.pop("scheduled_new_reqs")
    values |= {field.name: getattr(cached, field.name) for field in dataclasses.fields(cached)}
    values["new"] = [(one.req_id, one.block_ids, one.num_computed_tokens, one.prompt_token_ids) for one in new]
    return {name: value.copy() if isinstance(value, list | dict | set) else value for name, value in values.items()}


def rows(logprobs: Any) -> list[tuple[int, float, int]] | None:
    """Return log-probs as rows of token, log-prob and rank."""
    return logprobs and [
        (ids[0], values[0], rank)
        for ids, values, rank in zip(*(column.tolist() for column in logprobs[:3]), strict=True)
    ]
