"""The protocol of rewards, their names in the logs, and checks before a run."""

import functools
import inspect
import math
import re
from collections.abc import Sequence
from typing import Protocol

from lightning_megatron_rl.sample import Sample

RESERVED_NAMES = {
    "mean",
    "std",
    "min",
    "max",
    "zero_spread_frac",
    "pass_at_k",
    "failed_frac",
    "environment",
    "overlong_penalty",
    "kl_penalty",
    "kl_capped_frac",
}  # metrics of the sum, and of what shapes it

# metrics of a validation set, beside which its rewards stand
_OF_A_SET = re.compile(r"(mean|pass|maj)_at_\d+(_low|_high)?|truncated_frac|success_frac|turns_mean")
_FAILED = "_failed_frac"


class RewardSetupError(ValueError):
    """Something that a reward needs is missing in the data or on the machine.

    It ends the run whatever `GuardedReward(on_error)` says.

    Example:
        A prompt without an answer, for a reward that compares with the answer.
    """


class Reward(Protocol):
    """Scores samples: any function or object that takes a list of samples and returns one number for each, in order.

    Annotate the parameter and the result as here, then a config may name the function or class by its dotted path.
    It may be an `async` function, or an object whose `__call__` is one; what it awaits is cancelled at the deadline.
    """

    def __call__(self, samples: list[Sample], /) -> list[float]:
        """Return one finite number per sample, in their order."""
        ...


def reward_name(reward: Reward) -> str:
    """Name of a reward in the logs: a function's name, an object's attribute `name`, or its class in snake case.

    A `functools.partial` is called as its function is, unless it was given an attribute `name`.

    Example:
        ``reward_name(math_equal) == "math_equal"``; an instance of ``class LengthPenalty`` is "length_penalty".
    """
    if isinstance(reward, functools.partial):
        return str(getattr(reward, "name", None) or reward_name(reward.func))
    if inspect.isroutine(reward):
        return reward.__name__
    snake_case = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(reward).__name__).lower()
    return str(getattr(reward, "name", snake_case))


def reward_names(rewards: Sequence[Reward], weights: Sequence[float] | None = None) -> list[str]:
    """Names of the rewards, after checking them and their weights: to be called before anything expensive starts.

    Raises:
        ValueError: no rewards, or one that is no list; a class; weights of another number or not finite; two rewards
            with one name, or a name that the logs use for something else.

    Example:
        ``reward_names([math_equal, FormatReward("<a>.*</a>")], [1.0, 0.1]) == ["math_equal", "format"]``
    """
    if callable(rewards):
        raise ValueError(f"the rewards are {reward_name(rewards)!r} alone: give a list, with this reward in it")
    for reward in rewards:
        if inspect.isclass(reward):
            raise ValueError(f"the reward {reward.__name__} is a class: give an object of it, {reward.__name__}(...)")
    names = [reward_name(reward) for reward in rewards]
    if not names:
        raise ValueError(
            "there are no rewards: name at least one, for example lightning_megatron_rl.rewards.math_equal"
        )
    for reward, name in zip(rewards, names, strict=True):
        if not callable(reward) or type(reward).__call__ is Reward.__call__:
            raise ValueError(
                f"the reward {name!r} is a {type(reward).__name__} without a method __call__(samples): a reward is a"
                " function, or an object, that returns one number per sample"
            )
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"{names.count(name)} of the rewards {names} are called {name!r}: rename one of them (the attribute"
                " `name` of an object or a functools.partial)"
            )
        if name in RESERVED_NAMES:
            raise ValueError(
                f"a reward is called {name!r}, but reward/{name} is a metric of the sum: rename the reward"
            )
        if _OF_A_SET.fullmatch(name):
            raise ValueError(
                f"a reward is called {name!r}, but val/<set>/{name} is another metric of an evaluation: rename the"
                " reward"
            )
        of = name.removesuffix(_FAILED)
        if of != name and of in {*names, "environment"}:
            raise ValueError(
                f"a reward is called {name!r}, but reward/{name} counts the failures of {of!r}: rename the reward"
            )
    if weights is not None and not isinstance(weights, list | tuple):
        raise ValueError(f"reward_weights={weights!r}: give a list, one weight per reward, in the order of the rewards")
    if weights is not None and len(weights) != len(names):
        raise ValueError(f"{len(weights)} reward weights for {len(names)} rewards {names}: give one weight per reward")
    for name, weight in zip(names, weights or [], strict=False):
        if not math.isfinite(weight):
            raise ValueError(f"the weight of the reward {name!r} is {weight}: give a finite number")
    return names


def describe_sample(sample: Sample) -> str:
    """Say which sample this is in an error: data set, prompt index, shortened prompt and response."""
    prompt = sample.prompt
    return (
        f"the sample of prompt {prompt.index} of {prompt.dataset!r} "
        f"(prompt {_shorten(prompt.text)}, response {_shorten(sample.response)})"
    )


def _shorten(text: str, limit: int = 100) -> str:
    """Return the text as a literal, its middle left out beyond `limit` characters."""
    return repr(text) if len(text) <= limit else f"{text[: limit // 2]!r} ... {text[-limit // 2 :]!r}"
