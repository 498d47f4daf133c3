"""The guard: whatever an environment returns instead of a reply is named, and nothing waits for it."""

import asyncio
import math
import time
from typing import Any

import pytest
import torch

from lightning_megatron_rl.environments import (
    Action,
    ContractError,
    Ending,
    EnvironmentSetupError,
    EpisodeSettings,
    GuardedEnvironment,
    Reply,
)
from lightning_megatron_rl.rewards.deadline import DeadlineError
from lightning_megatron_rl.sample import Prompt
from tests.environments.games import Bad, Patient, PatientEpisode

PROMPTS = [Prompt([1], "a", index=0), Prompt([1], "b", index=1), Prompt([1], "c", index=2)]


def guard(environment: Any, **settings: Any) -> GuardedEnvironment:
    return GuardedEnvironment(environment, EpisodeSettings(**settings), vocab_size=128)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("text", "step returned a str"),
        (None, "step returned a NoneType"),
        (Reply(), "neither text nor token_ids"),
        (Reply("a", token_ids=[1]), "both text and token_ids"),
        (Reply("a", done=True), "Reply.done with text"),
        (Reply(""), "Reply.text is ''"),
        (Reply(7), r"Reply.text is 7"),  # type: ignore[arg-type]
        (Reply("caf\udce9"), r"Reply.text holds '\\udce9', half of a character: .*errors='replace'"),
        (Reply(token_ids=[]), r"Reply.token_ids is \[\]"),
        (Reply(token_ids=torch.tensor([1])), "give a list"),  # type: ignore[arg-type]
        (Reply(token_ids=[1, 2.0]), r"token_ids\[1\] is 2.0, a float"),  # type: ignore[list-item]
        (Reply(token_ids=[True]), r"token_ids\[0\] is True, a bool"),
        (Reply(token_ids=[128]), r"token_ids\[0\] is 128, outside the vocabulary of 128"),
        (Reply(token_ids=[-1]), r"token_ids\[0\] is -1, outside"),
        (Reply("a", reward=math.nan), "Reply.reward is nan"),
        (Reply("a", reward="1"), "Reply.reward is '1'"),  # type: ignore[arg-type]
        (Reply(done=1), "Reply.done is 1"),  # type: ignore[arg-type]
    ],
)
def test_reply_outside_the_contract_costs_its_episode_alone(reply: Any, message: str):
    guarded = guard(Bad(reply))
    episodes: Any = guarded.start(PROMPTS, [1, 2, 3])
    first, bad, last = guarded.step(episodes, [Action("x", [9], number=1)] * 3)
    assert first == last == Reply("ok", reward=0.25)
    assert isinstance(bad, ContractError)
    with pytest.raises(ContractError, match=message):
        raise bad


@pytest.mark.parametrize("where", ["start", "step", "finish"])
@pytest.mark.parametrize(
    ("reply", "kind"), [(ZeroDivisionError("no"), ZeroDivisionError), ("hang", DeadlineError), (5, ContractError)]
)
def test_failing_and_hanging_calls_end_by_the_deadline(where: str, reply: Any, kind: type[BaseException]):
    guarded = guard(Bad(reply, where), deadline_s=0.3)
    started = time.monotonic()
    episodes: Any = guarded.start(PROMPTS, [1, 2, 3])
    results = {"start": episodes}
    if where != "start":
        results["step"] = guarded.step(episodes, [Action("x", [9], number=1)] * 3)
        results["finish"] = guarded.finish(episodes, ["done"] * 3)
    assert time.monotonic() - started < 5
    assert [isinstance(result, BaseException) for result in results[where]] == [False, True, False]
    assert isinstance(results[where][1], kind)


@pytest.mark.parametrize(
    ("ending", "message"),
    [(Ending(math.inf), "Ending.reward is inf"), (Ending(success=1), "Ending.success is 1")],  # type: ignore[arg-type]
)
def test_ending_outside_the_contract(ending: Ending, message: str):
    guarded = guard(Bad(ending, "finish"))
    episodes: Any = guarded.start(PROMPTS, [1, 2, 3])
    bad = guarded.finish(episodes, ["done"] * 3)[1]
    with pytest.raises(ContractError, match=message):
        raise bad  # type: ignore[misc]


def test_what_is_missing_in_the_data_ends_the_run():
    with pytest.raises(EnvironmentSetupError, match="no map"):
        guard(Bad(EnvironmentSetupError("no map"), "start")).start(PROMPTS, [1, 2, 3])


def test_environment_may_be_async():
    guarded = guard(Patient())
    episodes: Any = guarded.start(PROMPTS, [1, 2, 3])
    assert guarded.step(episodes, [Action("x", [9])] * 3) == [Reply("ok")] * 3
    assert guarded.finish(episodes, ["done"] * 3) == [Ending(0.5)] * 3


def test_more_hanging_episodes_than_threads_cost_only_themselves():
    guarded = guard(Bad("hang"), deadline_s=4.0, concurrency=2)
    episodes: Any = guarded.start([PROMPTS[1], PROMPTS[1], PROMPTS[2]], [1, 2, 3])
    *bad, last = guarded.step(episodes, [Action("x", [9], number=1)] * 3)
    assert [type(one) for one in bad] == [DeadlineError] * 2
    assert last == Reply("ok", reward=0.25)


class OneQueue(Patient):
    """Its episode keeps something of the first call's event loop."""

    def start(self, prompt: Prompt, seed: int) -> Any:
        queue: asyncio.Queue[int] = asyncio.Queue()

        class Waits(PatientEpisode):
            async def step(self, action: Action) -> Reply:
                asyncio.get_running_loop().call_later(0.01, queue.put_nowait, 1)
                await queue.get()
                return Reply("ok")

        return Waits()


def test_an_event_loop_is_not_shared_between_calls():
    guarded = guard(OneQueue())
    episodes: Any = guarded.start(PROMPTS[:1], [1])
    assert guarded.step(episodes, [Action("x", [9])]) == [Reply("ok")]
    with pytest.raises(EnvironmentSetupError, match=r"the environment OneQueue: .*each call has an event loop of its"):
        guarded.step(episodes, [Action("x", [9])])


def test_deadline_fits_the_ranks_that_wait():
    settings = EpisodeSettings(max_turns=4, deadline_s=10)
    with pytest.raises(ValueError, match=r"6 x 10 = 60 s .*timeout_s=60"):
        GuardedEnvironment(Bad(1), settings, vocab_size=8, timeout_s=60.0)
    assert GuardedEnvironment(Bad(1), settings, vocab_size=8, timeout_s=61.0).deadline_s == 10
    assert GuardedEnvironment(Bad(1), EpisodeSettings(max_turns=4), vocab_size=8, timeout_s=60.0).deadline_s == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_turns": 0}, "max_turns=0"),
        ({"max_turn_tokens": 0}, "max_turn_tokens=0"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"reply_template": "no"}, "reply_template='no'"),
        ({"deadline_s": 0.0}, "deadline_s=0.0"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"default_reward": math.nan}, "default_reward=nan"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        EpisodeSettings(**options)
