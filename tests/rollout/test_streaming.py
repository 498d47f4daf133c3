"""Responses one by one in a real vLLM, with weights that change in the middle; and the stream that is made of them."""

import copy
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightning_megatron_rl.environments import Action, Ending, Environment, Episode, EpisodeSettings, Reply
from lightning_megatron_rl.environments.base import EnvironmentSetupError
from lightning_megatron_rl.environments.guard import GuardedEnvironment
from lightning_megatron_rl.rollout import GenerationRequest, SamplingParams, derive_seed
from lightning_megatron_rl.rollout.episodes import add_episode_rewards, play_episodes
from lightning_megatron_rl.rollout.protocol import (
    Progress,
    ResponsesLostError,
    StreamMode,
    StreamRequest,
)
from lightning_megatron_rl.rollout.stream import Response, SparePrompts, StreamPlan
from lightning_megatron_rl.rollout.streaming import RolloutStream
from lightning_megatron_rl.sample import Prompt, Sample
from tests.rollout.conftest import Harness, hf_logprobs, make_engine

EXACT = 1e-5  # fp32: sums in another order than Transformers'
TOKENS = 200  # of a response: many enough that an update comes before they are drawn
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
PROMPT_LENGTH = 20


@pytest.fixture(scope="module")
def keeping(model_dir) -> Iterator[Harness]:
    """Keeps the cache at an update, and samples only when it is asked."""
    engine = make_engine()
    engine.stream_mode = StreamMode(keeps_cache=True)
    engine.start(model_dir)
    yield Harness(engine, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval())
    engine.close()


def requests(count: int, max_tokens: int = TOKENS, start: int = 0) -> list[StreamRequest]:
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
            news = self.engine.collect(wait_s, everything=True)
            self.add(news)
            if news:
                deadline = time.monotonic() + 60

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
    for attempt in range(5):  # on a busy machine a sampler in the background may be done before the weights come
        old, asked, collected = copy.deepcopy(harness.model), requests(6, start=6 * attempt), Collected(harness)
        harness.engine.submit(asked, PARAMS)
        collected.until(lambda of=collected: of.shortest >= 10 and len(of.responses) == 6)
        harness.push_random_weights(seed + 100 * attempt)
        collected.until(lambda of=collected: of.are_complete)
        if all(len(response.segments) == 2 for response in collected.responses.values()):
            break
    return collected, asked, old


def test_tokens_behind_an_update_are_those_of_the_new_weights(streaming):
    harness = streaming
    harness.push_random_weights(21)
    collected, asked, old = update_in_the_middle(harness, 22)
    for request in asked:
        response = collected.responses[request.name]
        (first, num_old), (second, num_new) = response.segments
        assert (first, second) == (harness.version - 1, harness.version)
        assert num_old + num_new == len(response.token_ids) == TOKENS
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
    for start in range(60, 65):  # on a busy machine the sampler may be done before it is told to stop
        (request,) = requests(1, start=start)
        harness.engine.submit([request], PARAMS)
        collected.until(lambda name=request.name: len(collected.responses.get(name, Response()).token_ids) >= 10)
        collected.add(harness.engine.withdraw())
        response = collected.responses[request.name]
        if response.finish_reason is None:
            break
    assert response.finish_reason is None
    done = len(response.token_ids)
    assert harness.engine.collect(0.2, everything=True) == []
    harness.push_random_weights(41)
    rest = StreamRequest(request.name, request.token_ids + response.token_ids, 77, TOKENS - done)
    harness.engine.submit([rest], PARAMS)
    collected.until(lambda: collected.are_complete)
    assert len(response.token_ids) == TOKENS
    assert [count for _, count in response.segments] == [done, TOKENS - done]
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


def test_who_was_asked_samples_until_it_is_held(keeping):
    """Whoever waits is busy with what came now and then, and the sampler does not wait for that."""
    engine, collected = keeping.engine, Collected(keeping)
    engine.submit(requests(1, start=90), PARAMS)
    collected.add(engine.collect(0.001, everything=True))
    collected.until(lambda: collected.shortest > 20, wait_s=0.0)
    engine.hold()
    collected.add(engine.collect(0.0, everything=True))
    assert not collected.are_complete
    time.sleep(0.5)
    assert engine.collect(0.0, everything=True) == []
    collected.until(lambda: collected.are_complete, wait_s=5.0)


# ---- the stream ------------------------------------------------------------------------------------------------------


def rewarded(samples: list[Sample]) -> None:
    for sample in samples:
        sample.rewards, sample.reward = {"length": float(len(sample.response_ids))}, float(len(sample.response_ids))


def make_stream(
    harness: Harness, tokenizer, max_staleness: int, background: bool, in_flight: int = 6, **options
) -> RolloutStream:
    plan = StreamPlan(2, max_staleness, in_flight, num_generations=2)
    return RolloutStream(
        harness.engine,
        plan,
        SamplingParams(max_tokens=40),
        tokenizer=tokenizer,
        seed=9,
        background=background,
        **{"reward": rewarded, **options},
    )


def rows(count: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(12)
    token_ids = torch.randint(6, 101, (count, PROMPT_LENGTH), generator=generator).tolist()
    return [Prompt(ids, "", index=index) for index, ids in enumerate(token_ids)]


def check_samples(samples: list[Sample], models: dict[int, PreTrainedModel], version: int, max_staleness: int) -> None:
    """Every token under the version that drew it, none older than the bound."""
    for sample in samples:
        assert sample.outcome is not None or sample.reward == len(sample.response_ids)
        assert sum(count for _, count in sample.segments) == len(sample.response_ids)
        assert version - max_staleness <= sample.weight_version == sample.segments[0][0] <= version
        found, start = torch.tensor(sample.response_logprobs), 0
        for drawn_by, count in sample.segments:
            own = torch.tensor(sample.response_mask[start : start + count])
            expected = drawn(models[drawn_by], sample.prompt.token_ids, sample.response_ids)
            assert (found - expected)[start : start + count][own].abs().max() < EXACT
            assert (found[start : start + count][~own] == 0).all()
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


def test_a_replica_that_others_keep_waiting_samples_on(keeping, tokenizer):
    """For later batches; when nothing is left to sample it waits, and it says once for each batch that it has come."""
    harness, looks, arrivals = keeping, itertools.count(), 0
    harness.push_random_weights(55)

    def arrive() -> Callable[[], bool]:
        nonlocal arrivals
        arrivals += 1
        return lambda: len(stream.plan.ready) == 4 or (arrivals == 2 and next(looks) > 2)

    stream = make_stream(harness, tokenizer, 1, background=False, in_flight=2, arrive=arrive)
    first = stream.next_batch(rows(4), harness.version)
    assert (len(stream.plan.ready), arrivals) == (2, 1)
    second = stream.next_batch([], harness.version)
    assert (len(stream.plan.ready), arrivals, next(looks)) == (0, 2, 4)
    assert sorted(sample.prompt.index for sample in (first + second)[::2]) == [0, 1, 2, 3]
    stream.close()


def test_nothing_is_sampled_when_a_batch_was_given_out(keeping, tokenizer):
    """Its trainer has the same device."""
    harness = keeping
    harness.push_random_weights(56)
    stream = make_stream(harness, tokenizer, 1, background=False)
    harness.engine.submit(requests(1, start=97), PARAMS)  # which the stream does not know of, and which takes longer
    stream.next_batch(rows(4), harness.version)
    assert all(news.finish_reason is None for news in harness.engine.collect(0.0, everything=True))
    time.sleep(0.5)
    assert harness.engine.collect(0.0, everything=True) == []
    (rest,) = harness.engine.collect(60.0)  # so it was under way
    assert (rest.name, rest.finish_reason) == ("97", "length")
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


def test_nothing_begins_between_the_end_of_responses_and_the_update(streaming, tokenizer):
    """The thread waits for the engine meanwhile, and prompts for room."""
    harness = streaming
    harness.push_random_weights(82)
    stream = make_stream(harness, tokenizer, 3, background=True, in_flight=2)
    samples = stream.next_batch(rows(8), harness.version)
    stream.finish_under_way()
    assert stream.plan.waiting
    time.sleep(0.5)
    assert not stream.plan.num_growing
    for step in range(3):
        harness.push_random_weights(83 + step)
        samples += stream.next_batch([], harness.version)
        stream.finish_under_way()
    assert len(samples) == 16
    assert all(len(sample.segments) == 1 for sample in samples)
    stream.close()


@pytest.mark.parametrize("background", [True, False])
def test_a_closed_stream_leaves_nothing_in_the_engine(streaming, tokenizer, background):
    """Whole batches are sampled next, or a stream that gives its responses the same names."""
    harness = streaming
    harness.push_random_weights(90)
    plan = {"max_staleness": 2, "background": background}
    first = make_stream(harness, tokenizer, **plan)
    first.next_batch(rows(6), harness.version)
    assert first.plan.under_way or first.plan.ready
    harness.engine.submit(requests(1, start=90), PARAMS)  # longer than the stream's: it is under way for sure
    first.close()
    assert harness.engine.generate([GenerationRequest([7, 8], 1)], SamplingParams(max_tokens=2, ignore_eos=True))
    second = make_stream(harness, tokenizer, **plan)
    others = [Prompt(prompt.token_ids[::-1], "", index=prompt.index) for prompt in rows(6)]
    samples = second.next_batch(others, harness.version)
    check_samples(samples, {harness.version: harness.model}, harness.version, 0)
    second.close()


@pytest.mark.slow
def test_two_responses_of_one_name_are_refused(streaming):
    """The tokens of one would be taken for those of the other."""
    harness = streaming
    harness.engine.submit(requests(1, start=95), PARAMS)
    with pytest.raises(RuntimeError, match="a response '95' is under way already"):
        harness.engine.submit(requests(1, start=95), PARAMS)
    harness.push_random_weights(91)


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


# ---- groups without spread -------------------------------------------------------------------------------------------


def test_groups_without_spread_make_room_for_others(streaming, tokenizer):
    """Rows below 4 get equal rewards; the stream takes others, at most so many of them for a batch."""
    harness, prompts = streaming, rows(8)
    harness.push_random_weights(90)

    def judge(samples: list[Sample]) -> None:
        for place, sample in enumerate(samples):
            sample.reward = float(place if sample.prompt.index >= 4 else 0)

    spares = SparePrompts(lambda turn: prompts[4:], 0, 1, limit=3)
    stream = make_stream(harness, tokenizer, 1, background=False, in_flight=4, reward=judge, spares=spares)
    first = [sample.prompt.index for sample in stream.next_batch(prompts[:4], harness.version)[::2]]
    second = [sample.prompt.index for sample in stream.next_batch([], harness.version + 1)[::2]]
    assert stream.num_passed_over + spares.num_drawn >= 3
    used = first + second
    assert len(set(used)) == 4
    assert sum(row >= 4 for row in used) >= 3
    stream.close()


def test_at_the_limit_groups_without_spread_are_taken(streaming, tokenizer):
    def judge(samples: list[Sample]) -> None:
        for sample in samples:
            sample.reward = 1.0

    prompts = rows(8)
    spares = SparePrompts(lambda turn: prompts[4:], 0, 1, limit=1)
    stream = make_stream(streaming, tokenizer, 1, background=False, in_flight=2, reward=judge, spares=spares)
    batch = stream.next_batch(prompts[:4], streaming.version)
    assert len(batch) == 4
    assert stream.num_passed_over == 1
    stream.close()


# ---- episodes --------------------------------------------------------------------------------------------------------


class Talk(Environment):
    """Two replies and an end; some rows wait before they reply, row 99 cannot be played."""

    def __init__(self, waits: dict[int, float] | None = None) -> None:
        self.waits = waits or {}

    def start(self, prompt: Prompt, seed: int) -> Episode:
        if prompt.index == 99:
            raise EnvironmentSetupError("row 99 has no answer")
        return TalkEpisode(self.waits.get(prompt.index, 0.0), fails=prompt.index == 98)


class TalkEpisode(Episode):
    def __init__(self, wait_s: float, fails: bool) -> None:
        self.wait_s, self.fails = wait_s, fails

    def step(self, action: Action) -> Reply:
        time.sleep(self.wait_s)
        if self.fails:
            raise OSError("no game today")
        return Reply(done=True, reward=0.5) if action.number == 2 else Reply(token_ids=[40, 41 + action.number])

    def finish(self, reason: str) -> Ending:
        return Ending(1.0, success=reason == "done")


def talk(waits: dict[int, float] | None = None, **settings) -> GuardedEnvironment:
    options = EpisodeSettings(**{"max_turns": 4, "max_turn_tokens": 8, **settings})
    return GuardedEnvironment(Talk(waits), options, vocab_size=128)


def test_episodes_are_those_of_a_batch_that_is_played_at_once(streaming, tokenizer):
    """With the same seeds; every token under the version that drew it, none of the replies counts as drawn."""
    harness, prompts = streaming, rows(2)
    harness.push_random_weights(100)
    environment = talk()
    options = {"reward": add_episode_rewards, "environment": environment}
    stream = make_stream(harness, tokenizer, 1, background=False, **options)
    samples = stream.next_batch(prompts, harness.version)
    params, step = SamplingParams(max_tokens=40), {"seed": 9, "step": harness.version}
    expected = play_episodes(
        harness.engine, environment, prompts, params, num_generations=2, tokenizer=tokenizer, **step
    )
    assert [sample.response_ids for sample in samples] == [sample.response_ids for sample in expected]
    assert [sample.turns for sample in samples] == [sample.turns for sample in expected]
    assert [sample.outcome for sample in samples] == [sample.outcome for sample in expected]
    check_samples(samples, {harness.version: harness.model}, harness.version, 0)
    ended = [sample for sample in samples if sample.outcome is not None and sample.outcome.reason == "done"]
    assert all(sample.reward == pytest.approx(1.5) for sample in ended)
    assert ended
    stream.close()


@pytest.mark.parametrize("background", [True, False])
def test_a_slow_episode_holds_up_nobody_else(streaming, tokenizer, background):
    """Row 0 waits two seconds a turn: its group comes later, within the bound."""
    harness, prompts, models, used = streaming, rows(6), {}, []
    options = {"reward": add_episode_rewards, "environment": talk({0: 2.0})}
    stream = make_stream(harness, tokenizer, 1, background, **options)
    for step, part in enumerate((prompts[:4], prompts[4:], [])):
        harness.push_random_weights(101 + step)
        models[harness.version] = copy.deepcopy(harness.model)
        began = time.monotonic()
        samples = stream.next_batch(part, harness.version)
        if step == 0:
            assert time.monotonic() - began < 4.0  # its three turns take six seconds
        check_samples(samples, models, harness.version, min(step, 1))
        used.append([sample.prompt.index for sample in samples[::2]])
    assert sorted(row for batch in used for row in batch) == list(range(6))
    assert 0 not in used[0]
    stream.close()


def test_episodes_that_are_not_over_begin_anew_from_a_checkpoint(streaming, tokenizer):
    harness, prompts = streaming, rows(4)
    harness.push_random_weights(110)
    models = {harness.version: copy.deepcopy(harness.model)}
    options = {"reward": add_episode_rewards, "environment": talk({0: 2.0})}
    stream = make_stream(harness, tokenizer, 1, background=False, **options)
    first = stream.next_batch(prompts, harness.version)
    stream.put_away()
    state = stream.state()
    stream.close()
    resumed = make_stream(harness, tokenizer, 1, background=False, **options)
    resumed.load_state(state, {prompt.index: prompt for prompt in prompts})
    harness.push_random_weights(111)
    models[harness.version] = copy.deepcopy(harness.model)
    second = resumed.next_batch([], harness.version)
    check_samples(first, models, harness.version - 1, 0)
    check_samples(second, models, harness.version, 1)
    assert sorted(sample.prompt.index for sample in (first + second)[::2]) == [0, 1, 2, 3]
    of_row_0 = [sample for sample in second if sample.prompt.index == 0]
    assert all(sample.weight_version == harness.version for sample in of_row_0)
    resumed.close()


def test_an_environment_that_fails_costs_its_episode(streaming, tokenizer):
    prompts = [*rows(1), *(Prompt([7, 8, 9], "", index=index) for index in (98,))]
    options = {"reward": add_episode_rewards, "environment": talk()}
    stream = make_stream(streaming, tokenizer, 1, background=False, **options)
    samples = stream.next_batch(prompts, streaming.version)
    outcomes = {sample.prompt.index: sample.outcome.error for sample in samples if sample.outcome is not None}
    assert outcomes == {0: "", 98: "OSError: no game today"}
    stream.close()
    for settings, index, message in (({"on_error": "raise"}, 98, "no game today"), ({}, 99, "row 99 has no answer")):
        options["environment"] = talk(**settings)
        stream = make_stream(streaming, tokenizer, 1, background=index == 98, **options)
        with pytest.raises((RuntimeError, ValueError), match=message):
            stream.next_batch([*rows(1), Prompt([7, 8, 9], "", index=index)], streaming.version)
        stream.put_away()
        stream.close()
