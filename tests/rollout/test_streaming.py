"""Responses one by one in a real vLLM, with weights that change in the middle; and the stream that is made of them."""

import copy
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightning_megatron_rl.rollout import GenerationRequest, SamplingParams, derive_seed
from lightning_megatron_rl.rollout.protocol import Progress, ResponsesLostError, StreamMode, StreamRequest
from lightning_megatron_rl.rollout.stream import Response, StreamPlan
from lightning_megatron_rl.rollout.streaming import RolloutStream
from lightning_megatron_rl.sample import Prompt, Sample
from tests.rollout.conftest import Harness, hf_logprobs, make_engine

EXACT = 1e-5  # fp32: sums in another order than Transformers'
PARAMS = SamplingParams(max_tokens=80, ignore_eos=True)
PROMPT_LENGTH = 20


@pytest.fixture(scope="module")
def streaming(model_dir) -> Iterator[Harness]:
    """Recomputes the cache at an update, and samples while nobody asks."""
    engine = make_engine(max_restarts=100)
    engine.stream_mode = StreamMode(background=True)
    engine.start(model_dir)
    yield Harness(engine, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval())
    engine.close()


@pytest.fixture(scope="module")
def keeping(model_dir) -> Iterator[Harness]:
    """Keeps the cache at an update, and samples only when it is asked."""
    engine = make_engine()
    engine.stream_mode = StreamMode(keeps_cache=True)
    engine.start(model_dir)
    yield Harness(engine, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval())
    engine.close()


def requests(count: int, max_tokens: int = 80, start: int = 0) -> list[StreamRequest]:
    generator = torch.Generator().manual_seed(11)
    prompts = torch.randint(6, 101, (count, PROMPT_LENGTH), generator=generator).tolist()
    return [StreamRequest(f"{start + i}", prompt, derive_seed(3, 0, i), max_tokens) for i, prompt in enumerate(prompts)]


class Collected:
    """Responses put together from what an engine tells."""

    def __init__(self, harness: Harness) -> None:
        self.engine = harness.engine
        self.responses: dict[str, Response] = {}

    def add(self, news: list[Progress]) -> None:
        for progress in news:
            self.responses.setdefault(progress.name, Response()).add(progress)

    def until(self, reached: Callable[[], bool], wait_s: float = 0.01) -> None:
        deadline = time.monotonic() + 60
        while not reached():
            assert time.monotonic() < deadline, "nothing more came in a minute"
            time.sleep(0.0 if wait_s else 0.05)
            self.add(self.engine.collect(wait_s, everything=True))

    @property
    def shortest(self) -> int:
        return min((len(response.token_ids) for response in self.responses.values()), default=0)

    @property
    def are_complete(self) -> bool:
        return bool(self.responses) and all(r.finish_reason is not None for r in self.responses.values())


def drawn(model: PreTrainedModel, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Log-probs of a response's tokens, all under one model."""
    return hf_logprobs(model, prompt, response).gather(1, torch.tensor(response)[:, None])[:, 0]


def drawn_with_mixed_cache(
    old: PreTrainedModel, new: PreTrainedModel, prompt: list[int], response: list[int], num_old: int
) -> torch.Tensor:
    """Log-probs of the tokens behind the first `num_old`, under `new` with the keys and values that `old` left.

    The last token that `old` drew had not gone through it yet.
    """
    seen = prompt + response[: num_old - 1]
    with torch.no_grad():
        cache = old(torch.tensor([seen]), use_cache=True).past_key_values
        logits = new(torch.tensor([response[num_old - 1 : -1]]), past_key_values=cache).logits[0].float()
    logprobs = torch.log_softmax(logits, dim=-1)
    return logprobs.gather(1, torch.tensor(response[num_old:])[:, None])[:, 0]


def update_in_the_middle(harness: Harness, seed: int) -> tuple[Collected, list[StreamRequest], PreTrainedModel]:
    """Sample, change the weights when every response has some tokens, sample on; return also the model before."""
    old, asked, collected = copy.deepcopy(harness.model), requests(6), Collected(harness)
    harness.engine.submit(asked, PARAMS)
    collected.until(lambda: collected.shortest >= 10 and len(collected.responses) == 6)
    harness.push_random_weights(seed)
    collected.until(lambda: collected.are_complete)
    return collected, asked, old


def test_tokens_behind_an_update_are_those_of_the_new_weights(streaming):
    harness = streaming
    harness.push_random_weights(21)
    before = harness.version
    collected, asked, old = update_in_the_middle(harness, 22)
    for request in asked:
        response = collected.responses[request.name]
        (first, num_old), (second, num_new) = response.segments
        assert (first, second) == (before, before + 1)
        assert num_old + num_new == len(response.token_ids) == 80
        found = torch.tensor(response.logprobs)
        under_old = drawn(old, request.token_ids, response.token_ids)
        under_new = drawn(harness.model, request.token_ids, response.token_ids)
        assert (found - under_old)[:num_old].abs().max() < EXACT
        assert (found - under_new)[num_old:].abs().max() < EXACT
        assert (under_old - under_new).abs().max() > 0.1


def test_a_kept_cache_is_the_old_weights(keeping):
    harness = keeping
    harness.push_random_weights(31)
    collected, asked, old = update_in_the_middle(harness, 32)
    distances = []
    for request in asked:
        response = collected.responses[request.name]
        (_, num_old), _ = response.segments
        found = torch.tensor(response.logprobs)
        assert (found - drawn(old, request.token_ids, response.token_ids))[:num_old].abs().max() < EXACT
        mixed = drawn_with_mixed_cache(old, harness.model, request.token_ids, response.token_ids, num_old)
        assert (found[num_old:] - mixed).abs().max() < EXACT
        recomputed = drawn(harness.model, request.token_ids, response.token_ids)[num_old:]
        distances.append((mixed - recomputed).abs().mean().item())
    print(f"kept against recomputed: {sum(distances) / len(distances):.3f} nats a token")
    assert max(distances) > 0.01


def test_new_responses_share_no_cache_of_old_weights(keeping):
    """The same prompt again, longer than a block of the cache, while one of the old weights keeps it there."""
    harness, prompt = keeping, [6 + i % 90 for i in range(300)]
    harness.push_random_weights(33)
    collected = Collected(harness)
    harness.engine.submit([StreamRequest("old", prompt, 5, 40)], PARAMS)
    collected.until(lambda: collected.shortest >= 5)
    harness.push_random_weights(34)
    harness.engine.submit([StreamRequest("new", prompt, 6, 10)], PARAMS)
    collected.until(lambda: collected.are_complete and len(collected.responses) == 2)
    response = collected.responses["new"]
    found = torch.tensor(response.logprobs)
    assert (found - drawn(harness.model, prompt, response.token_ids)).abs().max() < EXACT


def test_a_whole_batch_shares_no_cache_of_old_weights(keeping):
    """As a validation between two updates, at the second of which nothing could be forgotten."""
    harness, prompt = keeping, [6 + i % 80 for i in range(300)]
    harness.push_random_weights(35)
    harness.engine.generate([GenerationRequest(prompt, 3)], PARAMS)
    collected = Collected(harness)
    harness.engine.submit(requests(1, start=90), PARAMS)
    collected.until(lambda: collected.shortest >= 5)
    harness.push_random_weights(36)
    harness.engine.withdraw()
    ((generation,),) = harness.engine.generate([GenerationRequest(prompt, 3)], PARAMS)
    found = torch.tensor(generation.logprobs)
    assert (found - drawn(harness.model, prompt, generation.token_ids)).abs().max() < EXACT


def test_seeds_draw_what_they_draw_in_a_batch(streaming):
    harness, asked, collected = streaming, requests(3, start=50), Collected(streaming)
    harness.engine.submit(asked, PARAMS)
    collected.until(lambda: collected.are_complete and len(collected.responses) == 3)
    whole = [GenerationRequest(request.token_ids, request.seed) for request in asked]
    for request, (generation,) in zip(asked, harness.engine.generate(whole, PARAMS), strict=True):
        assert collected.responses[request.name].token_ids == generation.token_ids


def test_what_was_withdrawn_goes_on(streaming):
    harness, collected = streaming, Collected(streaming)
    (request,) = requests(1, start=60)
    harness.engine.submit([request], PARAMS)
    collected.until(lambda: collected.shortest >= 10)
    collected.add(harness.engine.withdraw())
    response = collected.responses[request.name]
    assert response.finish_reason is None
    done = len(response.token_ids)
    assert harness.engine.collect(0.2, everything=True) == []
    harness.push_random_weights(41)
    rest = StreamRequest(request.name, request.token_ids + response.token_ids, 77, 80 - done)
    harness.engine.submit([rest], PARAMS)
    collected.until(lambda: collected.are_complete)
    assert len(response.token_ids) == 80
    assert [count for _, count in response.segments] == [done, 80 - done]
    under_new = drawn(harness.model, request.token_ids, response.token_ids)
    assert (torch.tensor(response.logprobs) - under_new)[done:].abs().max() < EXACT


def test_sampling_goes_on_while_nobody_asks(streaming):
    harness, collected = streaming, Collected(streaming)
    harness.engine.submit(requests(1, start=70), PARAMS)
    collected.until(lambda: collected.are_complete, wait_s=0.0)  # which takes no step


def test_only_who_is_asked_samples(keeping):
    harness, collected = keeping, Collected(keeping)
    harness.engine.submit(requests(1, start=70), PARAMS)
    time.sleep(1.0)
    assert harness.engine.collect(0.0, everything=True) == []
    with pytest.raises(RuntimeError, match="responses of a stream are under way: withdraw them first"):
        harness.engine.generate([GenerationRequest([7, 8], 1)], PARAMS)
    with pytest.raises(ResponsesLostError):  # that error ended the process
        harness.engine.collect(1.0)
    harness.engine.submit(requests(1, start=80), PARAMS)
    collected.until(lambda: collected.are_complete, wait_s=5.0)


# ---- the stream ------------------------------------------------------------------------------------------------------


def rewarded(samples: list[Sample]) -> None:
    for sample in samples:
        sample.rewards, sample.reward = {"length": float(len(sample.response_ids))}, float(len(sample.response_ids))


def make_stream(harness: Harness, tokenizer, max_staleness: int, background: bool, in_flight: int = 6) -> RolloutStream:
    plan = StreamPlan(2, max_staleness, in_flight, num_generations=2)
    params = SamplingParams(max_tokens=40)
    return RolloutStream(
        harness.engine, plan, params, tokenizer=tokenizer, seed=9, reward=rewarded, background=background
    )


def rows(count: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(12)
    token_ids = torch.randint(6, 101, (count, PROMPT_LENGTH), generator=generator).tolist()
    return [Prompt(ids, "", index=index) for index, ids in enumerate(token_ids)]


def check_samples(samples: list[Sample], models: dict[int, PreTrainedModel], version: int, max_staleness: int) -> None:
    """Every token under the version that drew it, none older than the bound."""
    for sample in samples:
        assert sample.reward == len(sample.response_ids)
        assert sum(count for _, count in sample.segments) == len(sample.response_ids)
        assert version - max_staleness <= sample.weight_version == sample.segments[0][0] <= version
        found, start = torch.tensor(sample.response_logprobs), 0
        for drawn_by, count in sample.segments:
            expected = drawn(models[drawn_by], sample.prompt.token_ids, sample.response_ids)
            assert (found - expected)[start : start + count].abs().max() < EXACT
            start += count


@pytest.mark.parametrize("background", [True, False])
def test_a_stream_keeps_its_bound_and_loses_nothing(streaming, tokenizer, background):
    """Four versions at a bound of one; in the end nothing is left."""
    harness = streaming
    stream = make_stream(harness, tokenizer, 1, background)
    models, used, prompts = {}, [], rows(8)
    parts = [prompts[:4], prompts[4:6], prompts[6:], []]
    first = harness.version + 1
    for step, part in enumerate(parts):
        harness.push_random_weights(50 + step)
        models[harness.version] = copy.deepcopy(harness.model)
        samples = stream.next_batch(part, harness.version)
        check_samples(samples, models, harness.version, min(1, harness.version - first))
        used += [sample.prompt.index for sample in samples[::2]]
    assert sorted(used) == list(range(8))
    assert (len(stream.plan.waiting), len(stream.plan.under_way), len(stream.plan.ready)) == (0, 0, 0)
    stream.close()


def test_an_engine_that_dies_takes_nothing_with_it(streaming, tokenizer):
    harness = streaming
    harness.push_random_weights(60)
    stream = make_stream(harness, tokenizer, 1, background=False)
    models = {harness.version: copy.deepcopy(harness.model)}
    prompts = rows(4)
    first = stream.next_batch(prompts, harness.version)
    assert stream.plan.under_way or stream.plan.ready
    assert harness.engine.pid is not None
    os.kill(harness.engine.pid, signal.SIGKILL)
    harness.push_random_weights(61)
    models[harness.version] = copy.deepcopy(harness.model)
    second = stream.next_batch([], harness.version)
    check_samples(first, models, harness.version - 1, 0)
    check_samples(second, models, harness.version, 1)
    assert sorted(sample.prompt.index for sample in (first + second)[::2]) == [0, 1, 2, 3]
    stream.close()


def test_a_saved_stream_goes_on_where_it_was(streaming, tokenizer):
    """Ready groups with their rewards, unfinished ones with their tokens, prompts that wait."""
    harness, prompts = streaming, rows(6)
    harness.push_random_weights(70)
    stream = make_stream(harness, tokenizer, 2, background=False, in_flight=4)
    models = {harness.version: copy.deepcopy(harness.model)}
    first = stream.next_batch(prompts, harness.version)
    stream.put_away()
    state = stream.state()
    stream.close()

    resumed = make_stream(harness, tokenizer, 2, background=False, in_flight=4)
    resumed.load_state(state, {prompt.index: prompt for prompt in prompts})
    assert resumed.state() == state
    used = [sample.prompt.index for sample in first[::2]]
    for step in range(2):
        harness.push_random_weights(71 + step)
        models[harness.version] = copy.deepcopy(harness.model)
        samples = resumed.next_batch([], harness.version)
        check_samples(samples, models, harness.version, 2)
        used += [sample.prompt.index for sample in samples[::2]]
    assert sorted(used) == list(range(6))
    with pytest.raises(ValueError, match=r"holds the training row \d, which the training set does not have"):
        resumed.load_state(state, {})
    resumed.close()


def test_under_way_can_be_finished_first(streaming, tokenizer):
    """Then no response has tokens of two versions."""
    harness = streaming
    harness.push_random_weights(80)
    stream = make_stream(harness, tokenizer, 1, background=False)
    samples = stream.next_batch(rows(4), harness.version)
    stream.finish_under_way()
    harness.push_random_weights(81)
    samples += stream.next_batch([], harness.version)
    assert all(len(sample.segments) == 1 for sample in samples)
    stream.close()


def test_a_reward_that_fails_ends_the_wait(streaming, tokenizer):
    def failing(samples: list[Sample]) -> None:
        raise RuntimeError("no judge today")

    for background in (True, False):
        plan = StreamPlan(2, 1, 4, num_generations=2)
        stream = RolloutStream(
            streaming.engine, plan, PARAMS, tokenizer=tokenizer, seed=1, reward=failing, background=background
        )
        with pytest.raises(RuntimeError, match="no judge today"):
            stream.next_batch(rows(4), streaming.version)
        stream.put_away()
        stream.close()
