"""Streams that are saved and go on: where they were, with other settings, and with an engine that lost its weights."""

import copy
import json
from typing import Any
from unittest import mock

import pytest

from lightning_megatron_rl.rollout import SamplingParams
from lightning_megatron_rl.rollout.episodes import add_episode_rewards
from lightning_megatron_rl.rollout.protocol import WeightsLostError
from lightning_megatron_rl.rollout.stream import StreamPlan
from lightning_megatron_rl.rollout.streaming import RolloutStream
from lightning_megatron_rl.sample import Prompt, Sample
from tests.rollout.conftest import Harness
from tests.rollout.test_streaming import check_samples, make_stream, rewarded, rows, talk


def test_a_saved_stream_goes_on_where_it_was(streaming, tokenizer):
    """Ready groups with their rewards, unfinished ones with their tokens, prompts that wait."""
    harness, prompts = streaming, rows(6)
    harness.push_random_weights(70)
    stream = make_stream(harness, tokenizer, 2, background=False, in_flight=4)
    models = {harness.version: copy.deepcopy(harness.model)}
    first = stream.next_batch(prompts, harness.version)
    stream.put_away()
    state = stream.state()
    assert stream.close()
    assert stream.known_state() == state

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


def saved_stream(harness: Harness, tokenizer, prompts: list[Prompt]) -> str:
    """The state of a stream that has given out one batch of three, and has responses that are not complete."""
    harness.push_random_weights(92)
    stream = make_stream(
        harness,
        tokenizer,
        2,
        background=False,
        judged_by="length",
        arrive=lambda: lambda: len(stream.plan.ready) == 6,  # all of them are complete
    )
    stream.next_batch(prompts, harness.version)
    saved = json.loads(stream.state())
    stream.close()
    for number, group in enumerate(saved["groups"]):  # two as if they had been saved a little earlier
        for response in group["responses"]:
            if number < 2:
                response["finish_reason"], group["rewards"] = None, None
                for name in ("token_ids", "logprobs"):
                    response[name] = response[name][:30]
                response["segments"] = [[response["segments"][0][0], len(response["token_ids"])]]
    return json.dumps(saved)


def test_a_saved_stream_goes_on_with_other_sizes(streaming, tokenizer):
    """Groups of another number of responses begin anew; so do responses that would have no room left."""
    harness, prompts = streaming, rows(6)
    state = saved_stream(harness, tokenizer, prompts)
    by_row = {prompt.index: prompt for prompt in prompts}
    for generations, tokens in ((3, 40), (2, 20)):
        plan = StreamPlan(2, 2, 6, generations)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        stream = RolloutStream(harness.engine, plan, params, tokenizer=tokenizer, seed=9, reward=rewarded)
        stream.load_state(state, by_row)
        if generations == 3:
            assert not plan.ready
            assert len(plan.waiting) == len(json.loads(state)["groups"]) + len(json.loads(state)["waiting"])
        samples = stream.next_batch([], harness.version) + stream.next_batch([], harness.version)
        assert len(samples) == 4 * generations
        for start in range(0, len(samples), generations):
            assert len({sample.prompt.index for sample in samples[start : start + generations]}) == 1
        begun_anew = [sample for sample in samples if len(sample.response_ids) == tokens]
        check_samples(begun_anew, {harness.version: harness.model}, harness.version, 2)
        stream.close()


@pytest.mark.parametrize("plays", [True, False])
def test_groups_that_are_no_episodes_begin_anew_with_an_environment_and_the_other_way_round(
    streaming, tokenizer, plays
):
    """Nobody has judged such a response's ending, or would know it."""
    harness, prompts = streaming, rows(6)
    harness.push_random_weights(93)
    options: dict[bool, dict[str, Any]] = {
        False: {"reward": rewarded},
        True: {"reward": add_episode_rewards, "environment": talk()},
    }
    first = make_stream(harness, tokenizer, 2, background=False, **options[not plays])
    first.next_batch(prompts, harness.version)
    while not any(group.is_complete for group in [*first.plan.ready, *first.plan.under_way.values()]):
        with first._lock:
            first._turn(1.0)
    assert first.close()
    state = first.known_state()
    stream = make_stream(harness, tokenizer, 2, background=False, **options[plays])
    stream.load_state(state, {prompt.index: prompt for prompt in prompts})
    samples = stream.next_batch([], harness.version) + stream.next_batch([], harness.version)
    assert len(samples) == 8
    assert all((sample.outcome is not None) == plays == ("environment" in sample.rewards) for sample in samples)
    stream.close()


@pytest.mark.parametrize(("judged_by", "again"), [("length", False), ("another", True)])
def test_groups_that_others_judged_are_judged_again(streaming, tokenizer, judged_by, again):
    prompts, judged = rows(6), []
    state = saved_stream(streaming, tokenizer, prompts)

    def judge(samples: list[Sample]) -> None:
        judged.append(samples[0].prompt.index)
        rewarded(samples)

    stream = make_stream(streaming, tokenizer, 2, background=False, reward=judge, judged_by=judged_by)
    stream.load_state(state, {prompt.index: prompt for prompt in prompts})
    ready = [group["row"] for group in json.loads(state)["groups"] if group["rewards"] is not None]
    samples = stream.next_batch([], streaming.version) + stream.next_batch([], streaming.version)
    assert len(samples) == 8
    assert ready
    assert set(ready) & set(judged) == (set(ready) if again else set())
    stream.close()


def test_a_state_is_saved_while_the_engine_has_no_weights(streaming, tokenizer):
    """It gets them at the next update; a thread that met that before does not ask for them twice."""
    harness, prompts = streaming, rows(6)
    harness.push_random_weights(94)
    stream = make_stream(harness, tokenizer, 2, background=False)
    stream.next_batch(prompts, harness.version)
    with mock.patch.object(harness.engine, "collect", side_effect=WeightsLostError("no server has them")):
        state = json.loads(stream.state())
    assert len(state["groups"]) + len(state["waiting"]) == 4
    stream.close()
    harness.push_random_weights(95)
    stream = make_stream(harness, tokenizer, 2, background=False)
    stream._error = WeightsLostError("no server had them")
    assert len(stream.next_batch(prompts, harness.version)) == 4
    stream.close()
