"""What vLLM does in Python for each token, without what it does for nothing.

In every step vLLM plans for each response how many tokens it gets, asks whether the cache needs a block more and
whether one is full, and hands its log-prob on as arrays of one number (vLLM 0.26). From some hundred responses on that
takes longer than the GPU does. Here a step in which every response gets one token is planned at once, nothing is asked
where the answer is known to be "nothing to do", and numbers stay numbers. Plans, tokens, log-probs and the cache are
those of vLLM's own code, which everything else still goes through.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.outputs import ModelRunnerOutput

_plain_update = LogprobsProcessor._update_sample_logprobs


def quicken(llm: "LLM") -> bool:
    """Leave out of vLLM's steps what does nothing; return whether that was possible.

    It is for one cache of full attention with vLLM's prefix cache, no draft tokens, and the engine core in this
    process. Otherwise vLLM stays as it is.
    """
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None or not quicken_scheduler(core.scheduler):
        return False
    LogprobsProcessor._update_sample_logprobs = _append  # type: ignore[method-assign]
    return True


def quicken_scheduler(scheduler: Any) -> bool:
    """Make a scheduler plan and take tokens quickly, if it is of a known kind; return whether it is.

    What it hands on is for `quicken`, or whoever reads log-probs as rows of token, log-prob and rank.
    """
    if not _is_known(scheduler):
        return False
    cache = _Cache(scheduler.kv_cache_manager)
    scheduler.schedule = _Decoding(scheduler, cache).schedule
    _take_tokens_quickly(scheduler, cache)
    _hand_on_numbers(scheduler)
    return True


def _is_known(scheduler: Any) -> bool:
    """Whether it is a scheduler whose steps this module knows."""
    if type(scheduler) not in (Scheduler, AsyncScheduler):
        return False
    manager = scheduler.kv_cache_manager
    singles = manager.coordinator.single_type_managers
    unknown = (
        scheduler.num_spec_tokens,
        scheduler.num_lookahead_tokens,
        scheduler.num_sampled_tokens_per_step != 1,
        scheduler.use_pp,
        scheduler.lora_config,
        scheduler.connector,
        scheduler.defer_block_free,
        scheduler.ec_connector,
        scheduler.enable_return_routed_experts,
        scheduler.is_encoder_decoder,
        scheduler.vllm_config.model_config.is_multimodal_model,
        scheduler.need_mamba_block_aligned_split,
        scheduler.log_stats,
        type(manager) is not KVCacheManager,
        [type(single) for single in singles] != [FullAttentionManager],
        not manager.enable_caching,
        singles[0].block_size != manager.block_pool.hash_block_size,
    )
    return not any(unknown)


class _Cache:
    """Blocks of responses under way. A block holds `block_size` tokens."""

    def __init__(self, manager: KVCacheManager) -> None:
        (single,) = manager.coordinator.single_type_managers
        self.manager = manager
        self.block_size: int = single.block_size
        self._blocks = single.req_to_blocks
        self._num_cached: dict[str, int] = single.num_cached_block  # full ones that are in the prefix cache
        self._shared_tails = single._partial_hit_reqs

    def room(self, name: str) -> int:
        """Return the tokens that a response's blocks hold."""
        return len(self._blocks.get(name, ())) * self.block_size

    def end_of_uncached(self, name: str) -> int:
        """Return the number of tokens with which a response's next block is full."""
        return (self._num_cached.get(name, 0) + 1) * self.block_size

    def can_give(self, count: int) -> bool:
        """Whether so many blocks are free, and none has to be copied first."""
        return not self._shared_tails and bool(count <= self.manager.block_pool.get_num_free_blocks())


class _Decoding:
    """Plans steps in which every response that is under way gets one token."""

    def __init__(self, scheduler: Scheduler, cache: _Cache) -> None:
        self._scheduler, self._cache = scheduler, cache
        self._plain = scheduler.schedule
        self._counts_ahead = type(scheduler) is AsyncScheduler  # tokens that are begun, and not there yet

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan a step, as vLLM's function of this name."""
        requests = self._requests()
        return self._plan(requests) if requests else self._plain(throttle_prefills)

    def _requests(self) -> list[tuple[Request, bool]] | None:
        """Return what gets a token, and whether the cache has to do something for it; None for another kind of step."""
        scheduler, cache = self._scheduler, self._cache
        waits = scheduler.waiting or scheduler.skipped_waiting
        if (
            (waits and len(scheduler.running) < scheduler.max_num_running_reqs)
            or scheduler._inflight_prefills
            or scheduler._pause_state is not PauseState.UNPAUSED
            or len(scheduler.running) > scheduler.max_num_scheduled_tokens
        ):
            return None
        found: list[tuple[Request, bool]] = []
        count, longest = 0, scheduler.max_model_len
        for request in scheduler.running:
            computed, ahead = request.num_computed_tokens, request.num_output_placeholders
            if ahead and computed + 2 - ahead >= request.num_prompt_tokens + request.max_tokens:
                continue  # its last token is begun
            known, end = len(request._all_token_ids), computed + 1
            if (
                known + ahead != end
                or end >= longest
                or request.is_prefill_chunk
                or request.structured_output_request is not None
                or request.spec_token_ids
            ):
                return None
            name = request.request_id
            asks = end > cache.room(name) or min(end, known) >= cache.end_of_uncached(name)
            count += asks
            found.append((request, asks))
        return found if cache.can_give(count) else None

    def _plan(self, requests: list[tuple[Request, bool]]) -> SchedulerOutput:
        scheduler, manager = self._scheduler, self._cache.manager
        scheduler.current_step += 1
        manager.new_step_starts()
        names = [request.request_id for request, _ in requests]
        blocks: list[Any] = []
        for request, asks in requests:
            given = manager.allocate_slots(request, 1) if asks else None
            assert given is not None or not asks, "there were enough blocks"
            blocks.append(None if given is None else given.get_block_ids(allow_none=True))
        before = scheduler.prev_step_scheduled_req_ids
        tokens: dict[str, list[int]] = {}
        if not scheduler.use_v2_model_runner:
            new = ((request.request_id, request) for request, _ in requests)
            tokens = {name: request.all_token_ids.copy() for name, request in new if name not in before}
            before.clear()
            before.update(names)
        cached = CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids=tokens,
            new_block_ids=blocks,
            num_computed_tokens=[request.num_computed_tokens for request, _ in requests],
            num_output_tokens=[
                len(request._output_token_ids) + request.num_output_placeholders for request, _ in requests
            ],
        )
        planned = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=manager.get_num_common_prefix_blocks(scheduler.running[0].request_id),
            preempted_req_ids=scheduler.reset_preempted_req_ids,
            finished_req_ids=scheduler.finished_req_ids,
            free_encoder_mm_hashes=scheduler.encoder_cache_manager.get_freed_mm_hashes(),
            new_block_ids_to_zero=scheduler._get_new_block_ids_to_zero(),
        )
        scheduler.finished_req_ids, scheduler.reset_preempted_req_ids = set(), set()
        scheduler.prefill_capacity_bound = bool(scheduler.waiting)
        for request, _ in requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += self._counts_ahead
        return planned


def _take_tokens_quickly(scheduler: Scheduler, cache: _Cache) -> None:
    """Ask for blocks to cache, and for hashes of them, only when a token makes one full."""
    plain, longest = scheduler._update_request_with_output, scheduler.max_model_len
    counts_ahead = type(scheduler) is AsyncScheduler  # tokens that are begun before those before them are there

    def take(request: Request, new_token_ids: list[int]) -> tuple[list[int], bool]:
        if len(new_token_ids) != 1 or request.async_tokens_to_discard:
            return plain(request, new_token_ids)
        was_running = request.status is RequestStatus.RUNNING
        request._output_token_ids.extend(new_token_ids)
        request._all_token_ids.extend(new_token_ids)
        if request.num_tokens >= (len(request.block_hashes) + 1) * cache.block_size:
            request.update_block_hashes()
        stopped = check_stop(request, longest)
        if counts_ahead:
            request.num_output_placeholders -= 1
            done = request.num_computed_tokens - request.num_output_placeholders
            if was_running and done >= cache.end_of_uncached(request.request_id):
                cache.manager.cache_blocks(request, done)
        return new_token_ids, stopped

    scheduler._update_request_with_output = take  # type: ignore[method-assign]


class _Drawn(NamedTuple):
    """A sampled token."""

    token_id: int
    logprob: float
    rank: int


class _Numbers:
    """Log-probs of one sampled token of each response, taken out of their arrays all at once."""

    def __init__(self, lists: LogprobsLists) -> None:
        columns = lists.logprob_token_ids[:, 0], lists.logprobs[:, 0], lists.sampled_token_ranks
        self._rows = list(map(_Drawn, *(column.tolist() for column in columns)))

    def slice_request(self, index: int, count: int) -> list[_Drawn]:
        """Return those of a response, as vLLM's arrays do."""
        return self._rows[index : index + count]


def _hand_on_numbers(scheduler: Scheduler) -> None:
    plain = scheduler.update_from_output

    def update_from_output(scheduled: SchedulerOutput, output: "ModelRunnerOutput") -> Any:
        lists = output.logprobs
        if lists is not None and lists.cu_num_generated_tokens is None and lists.logprobs.shape[1] == 1:
            output.logprobs = cast("LogprobsLists", _Numbers(lists))
        return plain(scheduled, output)

    scheduler.update_from_output = update_from_output  # type: ignore[method-assign]


def _append(processor: LogprobsProcessor, drawn: LogprobsLists | list[_Drawn]) -> None:
    """Note the log-probs of a response's new tokens."""
    if not isinstance(drawn, list):
        _plain_update(processor, drawn)
        return
    if not drawn:
        return
    flat = processor.logprobs
    if processor.tokenizer is not None or not isinstance(flat, FlatLogprobs):  # these keep the tokens' texts, too
        ids, values, ranks = (np.array(column) for column in zip(*drawn, strict=True))
        _plain_update(processor, LogprobsLists(ids[:, None], values[:, None], ranks))
        return
    assert processor.cumulative_logprob is not None
    for token_id, logprob, rank in drawn:
        place = len(flat.token_ids)
        flat.start_indices.append(place)
        flat.end_indices.append(place + 1)
        flat.token_ids.append(token_id)
        flat.logprobs.append(logprob)
        flat.ranks.append(rank)
        flat.decoded_tokens.append(None)
        processor.cumulative_logprob += logprob
