"""Several rewards side by side, and what happens to a run when one of them fails, hangs or answers nonsense."""

import asyncio
import functools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

from lightning_megatron_rl.rewards import GuardedReward, Reward, RewardSetupError, compute_rewards, reward_name
from lightning_megatron_rl.rewards.deadline import BoundedCalls, DaemonPool, DeadlineError, _Interrupted
from lightning_megatron_rl.rewards.guard import guard_all
from lightning_megatron_rl.sample import Sample
from tests.distributed import CHILD_PATH
from tests.notices import silent, told
from tests.rewards.samples import HTTPJudgeV2, length, make_sample

DEADLINE = 2.0  # seconds; a call that does not hang takes microseconds, and a starved machine has stalls
SLACK = 5.0  # seconds that a busy machine may add to what is bounded by deadlines


def test_weighted_sum_and_components():
    samples = [make_sample("a"), make_sample("bcd")]
    compute_rewards(samples, [length, HTTPJudgeV2(2.0)], weights=[0.5, 10.0])
    assert [sample.rewards for sample in samples] == [
        {"length": 1.0, "http_judge_v2": 2.0},
        {"length": 3.0, "http_judge_v2": 2.0},
    ]
    assert [sample.reward for sample in samples] == [20.5, 21.5]
    compute_rewards(samples, [length])
    assert [(sample.rewards, sample.reward) for sample in samples] == [({"length": 1.0}, 1.0), ({"length": 3.0}, 3.0)]


def test_each_reward_is_called_once_with_the_whole_batch():
    batches = []

    def record(samples: list[Sample]) -> list[float]:
        batches.append(list(samples))
        return [0.0] * len(samples)

    samples = [make_sample("a"), make_sample("b")]
    compute_rewards(samples, [record])
    assert [[sample.response for sample in batch] for batch in batches] == [["a", "b"]]
    compute_rewards([], [record])
    assert len(batches) == 1


def test_numbers_that_are_no_floats():
    samples = [make_sample("a") for _ in range(4)]
    compute_rewards(samples, [functools.partial(constant, scores=(True, 2, Fraction(1, 2), 0.25))])
    assert [sample.reward for sample in samples] == [1.0, 2.0, 0.5, 0.25]
    assert all(type(sample.rewards["constant"]) is float for sample in samples)


def constant(samples: list[Sample], scores) -> list[float]:
    return scores


def strict(reward: Reward) -> GuardedReward:
    return GuardedReward(reward, on_error="raise")


SECOND = r"the sample of prompt 7 of 'train' \(prompt '2\+2=', response 'bad'\)"


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([1.0], r"'constant' returned 1 numbers for 2 samples.*prompt 3 of 'train'.*one number per sample"),
        ([1.0, 2.0, 3.0], "returned 3 numbers for 2 samples"),
        ([1.0, math.nan], f"'constant' returned nan for {SECOND}: return a finite number"),
        ([1.0, math.inf], f"returned inf for {SECOND}"),
        ([1.0, None], f"returned None, a NoneType, for {SECOND}: return a number"),
        ([1.0, "1"], f"returned '1', a str, for {SECOND}"),
        ([1.0, torch.tensor(1.0)], rf"returned tensor\(1.\), a Tensor, for {SECOND}.*\.item\(\)"),
        (torch.ones(2), r"returned a Tensor for 2 samples: return a list.*\.tolist\(\)"),
        (1.0, "returned a float for 2 samples"),
        (None, "returned a NoneType for 2 samples"),
    ],
)
def test_bad_results_are_refused_and_nothing_is_filled(scores, message: str):
    samples = [make_sample("ok", index=3), make_sample("bad", index=7, prompt="2+2=")]
    with pytest.raises(ValueError, match=message):
        compute_rewards(samples, [length, strict(functools.partial(constant, scores=scores))])
    assert [(sample.rewards, sample.reward) for sample in samples] == [({}, 0.0), ({}, 0.0)]


def raises_on_bad(samples: list[Sample]) -> list[float]:
    return [{"ok": 1.0}[sample.response] for sample in samples]


def raises_on_pairs(samples: list[Sample]) -> list[float]:
    if len(samples) > 1:
        raise OSError("too many")
    return [1.0]


def test_reward_that_raises_is_named_with_its_sample():
    samples = [make_sample("ok", index=3), make_sample("bad", index=7, prompt="2+2="), make_sample("ok")]
    with pytest.raises(RuntimeError, match=f"'raises_on_bad' raised KeyError: 'bad' on {SECOND}") as caught:
        compute_rewards(samples, [length, strict(raises_on_bad)])
    assert isinstance(caught.value.__cause__, KeyError)
    assert samples[0].rewards == {}


def test_reward_that_raises_on_no_sample_alone():
    samples = [make_sample("a", index=3), make_sample("b")]
    with pytest.raises(RuntimeError, match="raised OSError: too many on a batch of 2 samples, though on none of them"):
        compute_rewards(samples, [strict(raises_on_pairs)])


def hundred() -> list[Sample]:
    """Samples of which number 17 hangs and number 42 raises."""
    marks = {17: "hang", 42: "raise"}
    return [make_sample(marks.get(index, "fine"), index=index) for index in range(100)]


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """What hanging rewards wait for, so that their threads end with the test."""
    event = threading.Event()
    yield event
    event.set()


def test_hanging_and_raising_reward_among_a_hundred_samples(release):
    """The waits are inside native code, where no exception reaches a thread: they are left behind."""

    def reward(samples: list[Sample]) -> list[float]:
        for sample in samples:
            if sample.response == "hang":
                release.wait()
            if sample.response == "raise":
                raise KeyError("no such thing")
        return [1.0] * len(samples)

    samples = hundred()
    started = time.monotonic()
    with told() as caught:
        compute_rewards(samples, [length, GuardedReward(reward, deadline_s=DEADLINE, default=-0.5)], [0.0, 1.0])
    assert time.monotonic() - started < 2 * DEADLINE + SLACK
    assert [s.prompt.index for s in samples if s.reward != 1.0] == [17, 42]
    assert [s.reward for s in samples if s.reward != 1.0] == [-0.5, -0.5]
    assert {s.prompt.index: s.reward_errors for s in samples if s.reward_errors} == {
        17: {"reward": f"DeadlineError: not done within {DEADLINE:g} s"},
        42: {"reward": "KeyError: 'no such thing'"},
    }
    (message,) = caught
    assert "'reward' failed on 2 of 100 samples, which get -0.5: the sample of prompt 17 of 'train'" in message
    assert "prompt 42" in message


def test_more_hanging_samples_than_threads_cost_only_themselves(release):
    """Those that waited for a thread had their time pass, and all got the default."""

    def reward(samples: list[Sample]) -> list[float]:
        while any(sample.response == "loop" for sample in samples):
            pass
        if any(sample.response == "hang" for sample in samples):
            release.wait()
        return [1.0] * len(samples)

    samples = [make_sample(text) for text in ["hang", "loop", "hang", *["fine"] * 20]]
    started = time.monotonic()
    with told(rf"failed on 3 of {len(samples)} samples.*not done within"):
        scores = GuardedReward(reward, deadline_s=2 * DEADLINE, concurrency=2)(samples)
    assert time.monotonic() - started < 4 * DEADLINE + SLACK
    assert scores == [0.0] * 3 + [1.0] * 20


@pytest.mark.parametrize("share", [0.4, 0.8])  # of the time; the second is longer than a round's
def test_slow_calls_that_fit_into_the_time_are_not_given_up(share):
    calls = BoundedCalls(num_threads=2)
    outcomes = calls.run([functools.partial(time.sleep, share * 2 * DEADLINE), *[lambda: None] * 7], 2 * DEADLINE)
    assert outcomes == [None] * 8


def test_one_thread_makes_calls_one_after_the_other(release):
    """However long one takes: what is called may not be made for more."""
    began: list[int] = []

    def call(number: int) -> None:
        began.append(number)
        release.wait()

    outcomes = BoundedCalls(num_threads=1).run([functools.partial(call, number) for number in range(3)], DEADLINE)
    assert all(isinstance(outcome, DeadlineError) for outcome in outcomes)
    assert began == [0]


def test_loop_in_python_is_interrupted():
    """Without the interrupt the thread would take half of this process's time for ever."""
    rounds = 0

    def reward(samples: list[Sample]) -> list[float]:
        nonlocal rounds
        while samples[0].response == "hang":
            rounds += 1
        return [1.0]

    with told("DeadlineError"):
        assert GuardedReward(reward, deadline_s=DEADLINE)([make_sample("hang")]) == [0.0]
    patience = time.monotonic() + SLACK
    while any(thread.name == "reward" for thread in threading.enumerate()) and time.monotonic() < patience:
        time.sleep(0.01)
    before = rounds
    time.sleep(0.1)
    assert rounds == before


def test_reward_that_hangs_for_ever_is_not_called_for_ever(release):
    calls = BoundedCalls(num_threads=2, max_stuck=4)
    for _ in range(2):
        outcomes = calls.run([release.wait] * 2, seconds=0.05)
        assert all("not done within" in str(outcome) for outcome in outcomes)
    started = time.monotonic()
    (outcome,) = calls.run([lambda: 1], seconds=60.0)
    assert isinstance(outcome, DeadlineError)
    assert "4 earlier calls still hang" in str(outcome)
    assert time.monotonic() - started < SLACK
    release.set()
    patience = time.monotonic() + SLACK
    while isinstance(calls.run([lambda: 1], seconds=60.0)[0], DeadlineError):
        assert time.monotonic() < patience
        time.sleep(0.01)


def test_exit_inside_a_reward_is_a_failure_of_the_reward():
    def reward(samples: list[Sample]) -> list[float]:
        raise SystemExit(3)

    with told("SystemExit: 3"):
        assert GuardedReward(reward)([make_sample("a")]) == [0.0]


def test_number_that_is_none_costs_its_sample_alone():
    samples = [make_sample("a"), make_sample("b", index=7), make_sample("c")]
    reward = functools.partial(constant, scores=[1.0, math.nan, 3.0])
    with told(r"'constant' failed on 1 of 3 .*prompt 7.*returned nan"):
        compute_rewards(samples, [reward])
    assert [sample.reward for sample in samples] == [1.0, 0.0, 3.0]


@pytest.mark.parametrize("on_error", ["default", "raise"])
@pytest.mark.parametrize("scores", [None, [1.0], torch.ones(2)])
def test_result_of_another_shape_is_an_error_of_the_reward_whatever_on_error_says(on_error, scores):
    reward = GuardedReward(functools.partial(constant, scores=scores), on_error=on_error)
    with pytest.raises(ValueError, match="the reward 'constant' returned"):
        compute_rewards([make_sample("a"), make_sample("b")], [reward])


def test_what_data_lack_is_an_error_whatever_on_error_says():
    def reward(samples: list[Sample]) -> list[float]:
        raise RewardSetupError("no answers")

    with pytest.raises(RewardSetupError, match="no answers"):
        GuardedReward(reward)([make_sample("a"), make_sample("b")])


def test_batch_that_fails_as_a_whole_only_is_recovered_and_named():
    samples = [make_sample("a"), make_sample("b")]
    with told("on none of their samples alone .*OSError: too many.*lower batch_size"):
        compute_rewards(samples, [raises_on_pairs])
    assert [(sample.reward, sample.reward_errors) for sample in samples] == [(1.0, {}), (1.0, {})]


def test_batch_size():
    sizes = []

    def reward(samples: list[Sample]) -> list[float]:
        sizes.append(len(samples))
        return [float(sample.response) for sample in samples]

    samples = [make_sample(str(index)) for index in range(10)]
    assert GuardedReward(reward, batch_size=4)(samples) == [float(index) for index in range(10)]
    assert sorted(sizes) == [2, 4, 4]


async def slow_length(samples: list[Sample]) -> list[float]:
    await asyncio.sleep(0.01 if len(samples) == 1 and samples[0].response != "hang" else 3600)
    return length(samples)


class AsyncJudge:
    async def __call__(self, samples: list[Sample]) -> list[float]:
        await asyncio.sleep(0)
        return [2.0 for _ in samples]


def test_async_rewards():
    samples = [make_sample("abc"), make_sample("hang")]
    with told("'slow_length' failed on 1 of 2"):
        compute_rewards(samples, [GuardedReward(slow_length, deadline_s=DEADLINE), AsyncJudge()])
    assert [sample.rewards for sample in samples] == [
        {"slow_length": 3.0, "async_judge": 2.0},
        {"slow_length": 0.0, "async_judge": 2.0},
    ]
    patience = time.monotonic() + SLACK  # a coroutine is cancelled, no thread is left behind
    while any(thread.name == "reward" for thread in threading.enumerate()):
        assert time.monotonic() < patience
        time.sleep(0.01)


class OneClient:
    """Keeps something of the first call's event loop, as a client with open connections does."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[int] = asyncio.Queue()

    async def __call__(self, samples: list[Sample]) -> list[float]:
        asyncio.get_running_loop().call_later(0.01, self.queue.put_nowait, 1)
        try:
            return [float(await self.queue.get())]
        except RuntimeError as error:
            raise ConnectionError("no judge") from error  # as clients do


def test_an_event_loop_is_not_shared_between_calls():
    """All samples failed from the second rollout on, without a word about why."""
    reward = GuardedReward(OneClient(), deadline_s=10 * DEADLINE)
    assert reward([make_sample("a")]) == [1.0]
    with pytest.raises(RewardSetupError, match=r"'one_client'.* different event loop: each call has an event loop of"):
        reward([make_sample("a")])


def test_interruption_inside_an_event_loop_is_not_lost():
    """Its deadline and the call's pass together, so the loop is awake when the exception comes."""

    def interrupt() -> None:
        raise _Interrupted

    async def wait() -> None:
        asyncio.get_running_loop().call_soon(interrupt)
        await asyncio.sleep(3600)

    BoundedCalls().run([lambda: asyncio.run(wait())], seconds=DEADLINE)
    assert not any(thread.name == "reward" for thread in threading.enumerate())


def test_rewards_run_at_the_same_time():
    meeting = threading.Barrier(2, timeout=10.0)

    def first(samples: list[Sample]) -> list[float]:
        meeting.wait()
        return [1.0]

    def second(samples: list[Sample]) -> list[float]:
        meeting.wait()
        return [2.0]

    samples = [make_sample("a")]
    with silent():
        compute_rewards(samples, [first, second])
    assert samples[0].reward == 3.0


HANGS = """
import sys, time
from lightning_megatron_rl.__main__ import allow_interrupt
from lightning_megatron_rl.rewards import GuardedReward, compute_rewards
from lightning_megatron_rl.rewards.deadline import DaemonPool
from lightning_megatron_rl.sample import Prompt, Sample

def hangs(samples):
    print("hangs", flush=True)
    time.sleep(300)

def other(samples):
    return [0.0]

allow_interrupt()
count = int(sys.argv[1])
rewards = [GuardedReward(hangs, deadline_s=300.0), other][: max(count, 1)]
samples = [Sample(Prompt([1], "a"), [2], [-0.5], response="b")]
if count:
    compute_rewards(samples, rewards)
else:  # as a stream of rollouts does
    DaemonPool("rewards").submit(compute_rewards, samples, rewards).result()
"""
HANGING_ENVIRONMENT = """
import time
from lightning_megatron_rl.__main__ import allow_interrupt
from lightning_megatron_rl.environments.base import Environment, EpisodeSettings
from lightning_megatron_rl.environments.guard import GuardedEnvironment
from lightning_megatron_rl.rollout.protocol import SamplingParams
from lightning_megatron_rl.rollout.stream import Response
from lightning_megatron_rl.rollout.streamed_episodes import StreamedEpisodes
from lightning_megatron_rl.sample import Prompt

class Hangs(Environment):
    def start(self, prompt, seed):
        print("hangs", flush=True)
        time.sleep(300)

allow_interrupt()
guard = GuardedEnvironment(Hangs(), EpisodeSettings(deadline_s=300.0), vocab_size=9)
episodes = StreamedEpisodes(guard, SamplingParams(), None, max_model_len=9)
episodes.begin(Prompt([1], "a"), 0, Response(), 0)
while True:
    time.sleep(0.1)
"""


def test_a_pool_makes_as_many_calls_at_once_as_it_has_threads():
    pool, meeting = DaemonPool("a pool", 3), threading.Barrier(3)
    try:
        places = [pool.submit(meeting.wait, SLACK) for _ in range(3)]
        assert sorted(place.result(SLACK) for place in places) == [0, 1, 2]
    finally:
        pool.close()
    for thread in pool._threads:
        thread.join(SLACK)
    assert not any(thread.is_alive() for thread in pool._threads)


def test_a_pool_of_one_makes_calls_in_their_order_and_ends():
    worker, order, begun, goes_on = DaemonPool("a worker"), [], threading.Event(), threading.Event()
    assert [worker.submit(order.append, number) for number in range(3)][-1].result(SLACK) is None
    assert order == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        worker.submit(lambda: 1 // 0).result(SLACK)
    first = worker.submit(lambda: begun.set() or goes_on.wait(SLACK))
    second = worker.submit(order.append, 3)
    assert begun.wait(SLACK)
    worker.close()
    goes_on.set()
    assert first.result(SLACK) is True
    assert second.cancelled()
    (thread,) = worker._threads
    thread.join(SLACK)
    assert not thread.is_alive()


@pytest.mark.parametrize("code", [(HANGS, "0"), (HANGS, "1"), (HANGS, "2"), (HANGING_ENVIRONMENT,)])
def test_an_interrupt_does_not_wait_for_a_reward_or_an_environment_that_hangs(code):
    """Neither where they are waited for nor at the end of the process."""
    command = [sys.executable, "-c", *code]
    environment = {**os.environ, "PYTHONPATH": CHILD_PATH}
    run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert run.stdout.readline() == "hangs\n"
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=2 * SLACK)
    finally:
        run.kill()
        run.communicate()
    assert "KeyboardInterrupt" in said
    assert run.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline_s": 0.0}, "reward 'length': deadline_s=0.0 must be above 0"),
        ({"deadline_s": math.inf}, "deadline_s=inf"),
        ({"on_error": "ignore"}, "on_error='ignore': choose one of default, raise"),
        ({"default": math.nan}, "default=nan"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"concurrency": 0}, "concurrency=0"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        GuardedReward(length, **options)


class SpeechlessError(Exception):
    def __str__(self) -> str:
        return self.nothing


def test_an_error_that_cannot_say_what_it_is_costs_its_sample_alone():
    def reward(samples: list[Sample]) -> list[float]:
        if any(sample.response == "bad" for sample in samples):
            raise SpeechlessError
        return [1.0] * len(samples)

    scores, errors = GuardedReward(reward).score([make_sample("bad"), make_sample("good")])
    assert scores == [0.0, 1.0]
    assert errors == {0: "SpeechlessError: (no message: AttributeError)"}


def test_deadlines_fit_what_the_other_ranks_wait():
    guard = GuardedReward(length, deadline_s=30.0)
    assert [each.deadline_s for each in guard_all([guard, HTTPJudgeV2()], 1800.0)] == [30.0, 120.0]
    assert guard_all([guard, HTTPJudgeV2()], 100.0)[0] is guard
    assert guard_all([HTTPJudgeV2()], 60.0)[0].deadline_s == 15.0
    with pytest.raises(ValueError, match=r"deadline_s=30 of the reward 'length': .*2 x 30 = 60 s, .*timeout_s=60\)"):
        guard_all([guard], 60.0)


def test_guard_is_called_what_it_guards():
    assert reward_name(GuardedReward(HTTPJudgeV2())) == "http_judge_v2"
