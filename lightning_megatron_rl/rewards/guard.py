"""A guard around a reward: samples on which it fails or is late get a default."""

import math
from collections.abc import Sequence
from functools import partial
from numbers import Real
from typing import Any, Literal

from lightning_megatron_rl.rewards.base import Reward, RewardSetupError, describe_sample, reward_name
from lightning_megatron_rl.rewards.deadline import BoundedCalls, EventLoopError, awaited
from lightning_megatron_rl.sample import Sample, copies
from lightning_megatron_rl.utilities.notices import tell_loss
from lightning_megatron_rl.utilities.ranges import COUNT, FINITE, POSITIVE, check_ranges, check_words

DEADLINE_SECONDS = 120.0
_OnError = Literal["default", "raise"]
_MAX_NAMED = 3  # failed samples that a warning describes
_RANGES = {
    "deadline_s": POSITIVE.called("it is a number of seconds"),
    "default": FINITE,
    "batch_size": COUNT,
    "concurrency": COUNT,
}


class GuardedReward:
    """A reward with a deadline; samples on which it fails get a default.

    Every reward of a run is guarded; name this class in a config to change how. The reward is called with all samples
    (or `batch_size` of them). If that raises or is late, each of its samples is tried alone, so that only those
    are lost that fail by themselves: a reward may see a sample twice, and several calls may run at once. Each call gets
    copies: what a reward changes of its samples changes nothing else.

    Args:
        reward: What scores the samples; a plain function, an object, or an `async` one of either.
        deadline_s: Seconds for all samples of a call, and as long again for those that are tried alone.
        on_error: "default" gives a sample that fails `default` and goes on, "raise" ends the run on every rank.
        default: Reward of a sample that fails, before the weight.
        batch_size: Most samples of one call; all of them if not given.
        concurrency: Calls at one time; 1 for a reward that must not be called from several threads.

    Raises:
        ValueError: A setting is outside its range.
    """

    def __init__(
        self,
        reward: Reward,
        deadline_s: float = DEADLINE_SECONDS,
        on_error: _OnError = "default",
        default: float = 0.0,
        batch_size: int | None = None,
        concurrency: int = 8,
    ) -> None:
        self.reward = reward
        self.name = reward_name(reward)
        check_ranges(_RANGES, locals(), f"reward {self.name!r}: ")
        check_words({"on_error": _OnError}, locals(), f"reward {self.name!r}: ")
        self.deadline_s = deadline_s
        self.on_error = on_error
        self.default = default
        self.batch_size = batch_size
        self._calls = BoundedCalls(concurrency)

    def __call__(self, samples: list[Sample]) -> list[float]:
        """Return one number per sample, the default where the reward failed."""
        return self.score(samples)[0]

    def score(self, samples: list[Sample]) -> tuple[list[float], dict[int, str]]:
        """Return one number per sample, and by its position what went wrong with each that got the default.

        Raises:
            ValueError: The result is not a list with one number per sample: an error in the reward, whatever `on_error`
                says. With "raise" also for a number that is not finite.
            RewardSetupError: What the reward needs is not there.
            RuntimeError: With "raise": a sample on which the reward raised or was late, from the original exception.

        Example:
            ``GuardedReward(judge).score(samples)`` is ``([0.5, 0.0], {1: "TimeoutError: ..."})``.
        """
        size = self.batch_size or max(len(samples), 1)
        batches = [range(start, min(start + size, len(samples))) for start in range(0, len(samples), size)]
        outcomes: dict[int, float | BaseException] = {}
        failed_batches: dict[int, BaseException] = {}  # by each sample of more than one
        calls = [partial(self._call, [samples[i] for i in batch]) for batch in batches]
        results = self._calls.run(calls, self.deadline_s)
        for batch, result in zip(batches, results, strict=True):
            _raise_setup_error(result)
            if not isinstance(result, BaseException):
                outcomes |= dict(zip(batch, result, strict=True))
            elif len(batch) == 1:
                outcomes[batch[0]] = result
            else:
                failed_batches |= dict.fromkeys(batch, result)
        alone = self._calls.run([partial(self._call, [samples[i]]) for i in failed_batches], self.deadline_s)
        for index, single in zip(failed_batches, alone, strict=True):
            _raise_setup_error(single)
            outcomes[index] = single if isinstance(single, BaseException) else single[0]
        failures = {i: outcome for i, outcome in sorted(outcomes.items()) if isinstance(outcome, BaseException)}
        if self.on_error == "raise":
            self._raise(samples, failures, failed_batches)
        if failures or failed_batches:
            self._warn(samples, failures, failed_batches)
        scores = [self.default if i in failures else float(outcomes[i]) for i in range(len(samples))]  # type: ignore[arg-type]
        return scores, {index: describe_error(error) for index, error in failures.items()}

    def _call(self, samples: list[Sample]) -> list[float | BaseException]:
        """Return each sample's number, or what is wrong with it."""
        try:
            # copies: whatever it does to them, now or after its deadline
            scores: Any = awaited(self.reward(copies(samples)), self.deadline_s)
        except EventLoopError as error:
            raise RewardSetupError(f"the reward {self.name!r}: {error}") from error
        if not isinstance(scores, list | tuple):
            raise _WrongResultError(
                f"the reward {self.name!r} returned a {type(scores).__name__} for {len(samples)} samples: return a list"
                " with one number per sample (of an array or tensor its .tolist())"
            )
        if len(scores) != len(samples):
            raise _WrongResultError(
                f"the reward {self.name!r} returned {len(scores)} numbers for {len(samples)} samples, the first of them"
                f" {describe_sample(samples[0])}: return one number per sample, in their order"
            )
        return [self._check(score, sample) for score, sample in zip(scores, samples, strict=True)]

    def _check(self, score: Any, sample: Sample) -> float | BaseException:
        if not isinstance(score, Real):
            return _WrongNumberError(
                f"the reward {self.name!r} returned {score!r}, a {type(score).__name__}, for {describe_sample(sample)}:"
                " return a number (of a tensor its .item())"
            )
        if not math.isfinite(score):
            return _WrongNumberError(
                f"the reward {self.name!r} returned {score} for {describe_sample(sample)}: return a finite number"
            )
        return float(score)

    def _raise(
        self, samples: list[Sample], failures: dict[int, BaseException], batches: dict[int, BaseException]
    ) -> None:
        for index, error in failures.items():
            if isinstance(error, _WrongNumberError):
                raise ValueError(str(error))
            raise RuntimeError(
                f"the reward {self.name!r} raised {describe_error(error)} on {describe_sample(samples[index])}: "
                "give a bad response a low reward instead of raising, or set on_error to default"
            ) from error
        for index, error in batches.items():
            raise RuntimeError(
                f"the reward {self.name!r} raised {describe_error(error)} on a batch of {len(batches)} samples, though "
                f"on none of them alone, the first {describe_sample(samples[index])}: lower batch_size"
            ) from error

    def _warn(
        self, samples: list[Sample], failures: dict[int, BaseException], batches: dict[int, BaseException]
    ) -> None:
        named = [
            f"{describe_sample(samples[index])}: {describe_error(error)}"
            for index, error in list(failures.items())[:_MAX_NAMED]
        ]
        if not failures:
            error = next(iter(batches.values()))
            text = f"failed on batches and on none of their samples alone ({describe_error(error)}): lower batch_size"
        else:
            more = f"; and {len(failures) - _MAX_NAMED} more" if len(failures) > _MAX_NAMED else ""
            text = (
                f"failed on {len(failures)} of {len(samples)} samples, which get {self.default:g}: "
                f"{'; '.join(named)}{more}"
            )
        tell_loss(f"the reward {self.name!r} {text}")


def guarded(reward: Reward) -> GuardedReward:
    """Return the reward itself if it is guarded, otherwise under a guard with the default settings."""
    return reward if isinstance(reward, GuardedReward) else GuardedReward(reward)


def guard_all(rewards: Sequence[Reward], timeout_s: float) -> list[GuardedReward]:
    """Guard the rewards of a run whose other ranks wait for them no longer than `timeout_s`.

    Those without settings of their own get a deadline that fits.

    Raises:
        ValueError: A reward may take longer than the ranks wait, with the arithmetic.

    Example:
        ``guard_all([math_equal], timeout_s=60.0)[0].deadline_s == 15.0``
    """
    for reward in rewards:
        if isinstance(reward, GuardedReward) and 2 * reward.deadline_s >= timeout_s:
            raise ValueError(
                f"deadline_s={reward.deadline_s:g} of the reward {reward.name!r}: it may take 2 x "
                f"{reward.deadline_s:g} = {2 * reward.deadline_s:g} s, but the other ranks wait only "
                f"MegatronStrategy(timeout_s={timeout_s:g})."
                " Lower deadline_s or raise timeout_s."
            )
    deadline_s = min(DEADLINE_SECONDS, timeout_s / 4)
    return [
        reward if isinstance(reward, GuardedReward) else GuardedReward(reward, deadline_s=deadline_s)
        for reward in rewards
    ]


def describe_error(error: BaseException) -> str:
    """Return an exception's type and message in one line, shortened; halves of characters as escapes."""
    try:
        message = str(error)
    except Exception as why:
        message = f"(no message: {type(why).__name__})"
    text = " ".join(f"{type(error).__name__}: {message}".split()).encode(errors="backslashreplace").decode()
    return text if len(text) <= 500 else text[:500] + "..."


class _WrongResultError(ValueError):
    """The reward does not keep to its protocol, whatever the samples."""


class _WrongNumberError(ValueError):
    """One sample's number is none."""


def _raise_setup_error(outcome: object) -> None:
    if isinstance(outcome, _WrongResultError):
        raise ValueError(str(outcome))
    if isinstance(outcome, RewardSetupError):
        raise outcome
