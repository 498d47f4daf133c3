"""What a reward is, what it is called in the logs, and how several of them score a batch of samples."""

import functools
import inspect
import math
import re
from collections.abc import Sequence
from numbers import Real
from typing import Protocol

from lightning_megatron_rl.sample import Sample

RESERVED_NAMES = {"mean", "std", "min", "max", "zero_spread_frac", "pass_at_k"}  # metrics of the weighted sum


class Reward(Protocol):
    """Scores samples: any function or object that takes a list of samples and returns one number for each, in order.

    Annotate the parameter and the result as here, then a config may name the function or class by its dotted path.

    Example:
        ``def short(samples: list[Sample]) -> list[float]: return [1.0 / len(s.response_ids) for s in samples]``
    """

    def __call__(self, samples: list[Sample], /) -> list[float]:
        """Return one finite number per sample, in their order."""
        ...


def reward_name(reward: Reward) -> str:
    """Name of a reward in the logs: a function's name, an object's attribute `name`, or its class in snake case.

    Example:
        ``reward_name(math_equal) == "math_equal"``; an instance of ``class LengthPenalty`` is "length_penalty".
    """
    if isinstance(reward, functools.partial):
        return reward_name(reward.func)
    if inspect.isroutine(reward):
        return reward.__name__
    snake_case = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(reward).__name__).lower()
    return str(getattr(reward, "name", snake_case))


def reward_names(rewards: Sequence[Reward], weights: Sequence[float] | None = None) -> list[str]:
    """Names of the rewards, after checking them and their weights: to be called before anything expensive starts.

    Raises:
        ValueError: no rewards, weights of another number or not finite, two rewards with one name, or a name that the
            logs use for the weighted sum.

    Example:
        ``reward_names([math_equal, FormatReward("<a>.*</a>")], [1.0, 0.1]) == ["math_equal", "format"]``
    """
    names = [reward_name(reward) for reward in rewards]
    if not names:
        raise ValueError(
            "there are no rewards: name at least one, for example lightning_megatron_rl.rewards.math_equal"
        )
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{names.count(name)} of the rewards {names} are called {name!r}: rename one of them")
        if name in RESERVED_NAMES:
            raise ValueError(
                f"a reward is called {name!r}, but reward/{name} is a metric of the sum: rename the reward"
            )
    if weights is not None and len(weights) != len(names):
        raise ValueError(f"{len(weights)} reward weights for {len(names)} rewards {names}: give one weight per reward")
    for name, weight in zip(names, weights or [], strict=False):
        if not math.isfinite(weight):
            raise ValueError(f"the weight of the reward {name!r} is {weight}: give a finite number")
    return names


def compute_rewards(samples: list[Sample], rewards: Sequence[Reward], weights: Sequence[float] | None = None) -> None:
    """Fill `rewards` (each one by name, unweighted) and `reward` (their weighted sum, weights 1 by default) of samples.

    The samples stay as they are if anything is wrong.

    Raises:
        ValueError: rewards and weights that `reward_names` refuses; a result that is not a list with one finite number
            per sample.
        RuntimeError: a reward raised; from the original exception, with the sample that it raises on.

    Example:
        ``compute_rewards(samples, [math_equal, FormatReward("<a>.*</a>")], weights=[1.0, 0.1])``
    """
    names = reward_names(rewards, weights)
    if not samples:
        return
    columns = [_score(name, reward, samples) for name, reward in zip(names, rewards, strict=True)]
    for sample, scores in zip(samples, zip(*columns, strict=True), strict=True):
        sample.rewards = dict(zip(names, scores, strict=True))
        sample.reward = sum(weight * score for weight, score in zip(weights or [1.0] * len(names), scores, strict=True))


def describe_sample(sample: Sample) -> str:
    """Say which sample this is in an error: data set, prompt index, shortened prompt and response.

    Example:
        "the sample of prompt 3 of 'train' (prompt '1+1=', response '2')"
    """
    prompt = sample.prompt
    return (
        f"the sample of prompt {prompt.index} of {prompt.dataset!r} "
        f"(prompt {_shorten(prompt.text)}, response {_shorten(sample.response)})"
    )


def _shorten(text: str, limit: int = 100) -> str:
    """Return the text as a literal, its middle left out beyond `limit` characters."""
    return repr(text) if len(text) <= limit else f"{text[: limit // 2]!r} ... {text[-limit // 2 :]!r}"


def _score(name: str, reward: Reward, samples: list[Sample]) -> list[float]:
    """Return the checked scores of one reward."""
    try:
        scores = reward(samples)
    except Exception as error:
        raise RuntimeError(
            f"the reward {name!r} raised {type(error).__name__}: {error} on {_find_culprit(reward, samples)}: "
            "give a bad response a low reward instead of raising"
        ) from error
    if not isinstance(scores, list | tuple):
        raise ValueError(
            f"the reward {name!r} returned a {type(scores).__name__} for {len(samples)} samples: return a list with "
            "one number per sample (of an array or tensor its .tolist())"
        )
    if len(scores) != len(samples):
        raise ValueError(
            f"the reward {name!r} returned {len(scores)} numbers for {len(samples)} samples, the first of them "
            f"{describe_sample(samples[0])}: return one number per sample, in their order"
        )
    for sample, score in zip(samples, scores, strict=True):
        if not isinstance(score, Real):
            raise ValueError(
                f"the reward {name!r} returned {score!r}, a {type(score).__name__}, for {describe_sample(sample)}: "
                "return a number (of a tensor its .item())"
            )
        if not math.isfinite(score):
            raise ValueError(
                f"the reward {name!r} returned {score} for {describe_sample(sample)}: return a finite number"
            )
    return [float(score) for score in scores]


def _find_culprit(reward: Reward, samples: list[Sample]) -> str:
    """Describe the first sample that the reward raises on when it is alone."""
    for sample in samples:
        try:
            reward([sample])
        except Exception:
            return describe_sample(sample)
    return f"a batch of {len(samples)} samples, though on none of them alone, the first {describe_sample(samples[0])}"
