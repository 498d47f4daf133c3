"""What vLLM does in Python for each token, without what it does for nothing.

In every step vLLM plans for each response how many tokens it gets, asks whether the cache needs a block more and
whether one is full, and hands the token on through three objects and some ten functions (vLLM 0.26). From some hundred
responses on that takes longer than the GPU does. Here a step in which every response gets one token is planned at once,
the cache is asked where it has something to do, and a token that does not end its response is noted where it is to
stay. Plans, tokens, log-probs and the cache are those of vLLM's own code, which everything else still goes through.
"""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.outputs import ModelRunnerOutput

Note = Callable[[int, int, float, int], None]
"""Notes a token of a response: itself, and the token, log-prob and rank of its row of log-probs."""


def quicken(llm: "LLM") -> bool:
    """Leave out of vLLM's steps what does nothing; return whether that was possible.

    It is for one cache of full attention with vLLM's prefix cache, no draft tokens, and the engine core in this
    process. Otherwise vLLM stays as it is.
    """
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        return False
    states = llm.llm_engine.output_processor.request_states
    return quicken_scheduler(core.scheduler, lambda name: notes_of(states.get(name)))


def quicken_scheduler(scheduler: Any, notes: Callable[[str], Note | None]) -> bool:
    """Make a scheduler plan and take tokens quickly, if it is of a known kind; return whether it is.

    Args:
        scheduler: Of vLLM.
        notes: Returns by the name of a response that has a token where the next ones are noted; None: the scheduler
            hands them on.
    """
    if not _is_known(scheduler):
        return False
    cache = _Cache(scheduler.kv_cache_manager)
    scheduler.schedule = _Decoding(scheduler, cache).schedule
    scheduler.update_from_output = _Taking(scheduler, cache, notes).update_from_output
    return True


def notes_of(state: RequestState | None) -> Note | None:
    """Return what notes tokens in vLLM's state of a response; None if more has to be done with each than that."""
    if state is None or type(state.detokenizer) is not IncrementalDetokenizer:  # others make texts of all tokens
        return None
    processor, tokens = state.logprobs_processor, state.detokenizer.token_ids
    assert processor is not None
    flat = processor.logprobs
    is_told_at_end = state.output_kind is RequestOutputKind.FINAL_ONLY and state.queue is None
    does_more = state.is_prefilling or state.streaming_input or state.stats is not None
    if not isinstance(flat, FlatLogprobs) or not is_told_at_end or does_more:
        return None
    starts, ends, ids, values = flat.start_indices, flat.end_indices, flat.token_ids, flat.logprobs
    ranks, texts = flat.ranks, flat.decoded_tokens

    def note(token: int, of: int, value: float, rank: int) -> None:
        tokens.append(token)
        place = len(ids)
        starts.append(place)
        ends.append(place + 1)
        ids.append(of)
        values.append(value)
        ranks.append(rank)
        texts.append(None)
        processor.cumulative_logprob += value

    return note


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
        self.blocks: dict[str, Any] = single.req_to_blocks
        self.num_cached: dict[str, int] = single.num_cached_block  # full ones that are in the prefix cache
        self._shared_tails = single._partial_hit_reqs

    def can_give(self, count: int) -> bool:
        """Whether so many blocks are free, and none has to be copied first."""
        return not self._shared_tails and bool(count <= self.manager.block_pool.get_num_free_blocks())


class _Step(NamedTuple):
    """What gets a token in a step; lists of one entry for each response."""

    requests: list[Request]
    names: list[str]
    num_computed: list[int]
    num_drawn: list[int]  # tokens of the response, with those that are not there yet
    asking: list[int]  # places of those for which the cache has something to do


class _Decoding:
    """Plans steps in which every response that is under way gets one token."""

    def __init__(self, scheduler: Scheduler, cache: _Cache) -> None:
        self._scheduler, self._keys_and_values = scheduler, cache
        self._plain = scheduler.schedule
        self._counts_ahead = type(scheduler) is AsyncScheduler  # tokens that are begun, and not there yet

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan a step, as vLLM's function of this name."""
        step = self._look()
        return self._plan(step) if step is not None else self._plain(throttle_prefills)

    def _look(self) -> _Step | None:
        """Return what gets a token; None for another kind of step."""
        scheduler, cache = self._scheduler, self._keys_and_values
        waits = scheduler.waiting or scheduler.skipped_waiting
        if (
            (waits and len(scheduler.running) < scheduler.max_num_running_reqs)
            or scheduler._inflight_prefills
            or scheduler._pause_state is not PauseState.UNPAUSED
            or len(scheduler.running) > scheduler.max_num_scheduled_tokens
        ):
            return None
        step = _Step([], [], [], [], [])
        requests, names, num_computed, num_drawn, asking = step
        longest, size, blocks, num_cached = scheduler.max_model_len, cache.block_size, cache.blocks, cache.num_cached
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
            if end > len(blocks.get(name, ())) * size or known >= (num_cached.get(name, 0) + 1) * size:
                asking.append(len(names))
            requests.append(request)
            names.append(name)
            num_computed.append(computed)
            num_drawn.append(len(request._output_token_ids) + ahead)
        return step if requests and cache.can_give(len(asking)) else None

    def _plan(self, step: _Step) -> SchedulerOutput:
        scheduler, manager = self._scheduler, self._keys_and_values.manager
        scheduler.current_step += 1
        manager.new_step_starts()
        requests, names, num_computed, num_drawn, asking = step
        blocks: list[Any] = [None] * len(names)
        for place in asking:
            given = manager.allocate_slots(requests[place], 1)
            assert given is not None, "there were enough blocks"
            blocks[place] = given.get_block_ids(allow_none=True)
        before = scheduler.prev_step_scheduled_req_ids
        tokens: dict[str, list[int]] = {}
        if not scheduler.use_v2_model_runner:
            new = (request for request in requests if request.request_id not in before)
            tokens = {request.request_id: request.all_token_ids.copy() for request in new}
            before.clear()
            before.update(names)
        cached = CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids=tokens,
            new_block_ids=blocks,
            num_computed_tokens=num_computed,
            num_output_tokens=num_drawn,
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
        for request in requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += self._counts_ahead
        return planned


class _Growing(NamedTuple):
    """A response whose tokens are noted where they are to stay, but for those that may end it."""

    ends: frozenset[int]  # tokens
    longest: int  # number of tokens, with the prompt's, with which it ends
    note: Note


class _Taking:
    """Takes the tokens of a step: those that end nothing at once, the others as vLLM does."""

    def __init__(self, scheduler: Scheduler, cache: _Cache, notes: Callable[[str], Note | None]) -> None:
        self._scheduler, self._keys_and_values, self._notes = scheduler, cache, notes
        self._plain = scheduler.update_from_output
        self._counts_ahead = type(scheduler) is AsyncScheduler

    def update_from_output(self, scheduled: SchedulerOutput, output: "ModelRunnerOutput") -> Any:
        """Note what was sampled, and return what ended or is to be handed on; as vLLM's function of this name."""
        more = (
            output.prompt_logprobs_dict,
            output.pooler_output,
            output.kv_connector_output,
            output.num_nans_in_logits,
            output.routed_experts,
        )
        lists = output.logprobs
        if lists is None or lists.cu_num_generated_tokens is not None or lists.logprobs.shape[1] != 1 or any(more):
            return self._plain(scheduled, output)
        rest = copy.copy(scheduled)
        rest.num_scheduled_tokens = self._take(scheduled.num_scheduled_tokens, output)
        return self._plain(rest, output)

    def _take(self, counts: dict[str, int], output: "ModelRunnerOutput") -> dict[str, int]:
        """Take what can be taken at once; return what cannot, as in `counts`."""
        requests, cache, counts_ahead = self._scheduler.requests, self._keys_and_values, self._counts_ahead
        size, num_cached = cache.block_size, cache.num_cached
        places, drawn, lists = output.req_id_to_index, output.sampled_token_ids, output.logprobs
        assert lists is not None
        columns = lists.logprob_token_ids[:, 0], lists.logprobs[:, 0], lists.sampled_token_ranks
        ids, values, ranks = (column.tolist() for column in columns)
        rest = {}
        for name, count in counts.items():
            request = requests.get(name)
            if request is None or count != 1 or request.status is not RequestStatus.RUNNING:
                rest[name] = count
                continue
            growing = request.__dict__.get("growing")  # by `_begin`; it goes when the request does
            if growing is None:
                growing = self._begin(request)
            place = places[name]
            tokens = drawn[place]
            if growing is None or len(tokens) != 1 or request.async_tokens_to_discard:
                rest[name] = count
                continue
            token, every = tokens[0], request._all_token_ids
            known = len(every) + 1
            if token in growing.ends or known >= growing.longest:
                rest[name] = count
                continue
            request._output_token_ids.append(token)
            every.append(token)
            request.num_in_flight_tokens -= 1
            if known >= (len(request.block_hashes) + 1) * size:
                request.update_block_hashes()
            if counts_ahead:
                request.num_output_placeholders -= 1
                done = request.num_computed_tokens - request.num_output_placeholders
                if done >= (num_cached.get(name, 0) + 1) * size:
                    cache.manager.cache_blocks(request, done)
            growing.note(token, ids[place], values[place], ranks[place])
        return rest

    def _begin(self, request: Any) -> _Growing | None:
        """Return how a response grows; None if that is not known, or not yet."""
        params = request.sampling_params
        if (
            params is None
            or params.repetition_detection is not None
            or request.structured_output_request is not None
            or request.prompt_token_ids is None
            or request.prefill_stats is not None  # are handed on with the first token
            or request.resumable
            or request.mm_features
        ):
            return None
        note = self._notes(request.request_id)
        if note is None:
            return None
        ends = frozenset((params.eos_token_id, *(params.stop_token_ids or ())))
        longest = min(request.num_prompt_tokens + request.max_tokens, self._scheduler.max_model_len)
        request.growing = _Growing(ends, longest, note)
        return request.growing
