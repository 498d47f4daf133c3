"""The rewards that come with the package: equal as mathematics, equal as text, and the form of the response."""

import functools
import re

from lightning_megatron_rl.rewards.base import describe_sample
from lightning_megatron_rl.rewards.math_verifier import MathVerifier
from lightning_megatron_rl.sample import Sample


def math_equal(samples: list[Sample]) -> list[float]:
    r"""1.0 where the last expression of the response (boxed ones first) equals the prompt's answer by math-verify.

    The answer is the final one alone, "72" or "\frac{1}{2}" (of GSM8K what follows "####"). One without mathematics in
    it is compared as stripped text. An unevaluated expression of the same value counts: "23+49" is right for "72". The
    expression must stand between spaces, dollars or in \boxed{}: "<answer>72</answer>" contains none. A response that
    takes more than 5 s of CPU time to evaluate is wrong, with a warning. Works in every thread.

    Raises:
        ValueError: a prompt without an answer.

    Example:
        For the answer "0.5" the response "It is $\frac{1}{2}$." scores 1.0.
    """
    answers = [_answer(sample, "math_equal").strip() for sample in samples]
    return [
        float(answer == sample.response.strip() or _math_verifier().equal(answer, sample.response))
        for sample, answer in zip(samples, answers, strict=True)
    ]


class ExactMatch:
    """1.0 where the response is the prompt's answer, character by character.

    Args:
        strip: whether spaces and line breaks at both ends of either are left out.
        ignore_case: whether upper and lower case are the same.
        name: what it is called in the logs.

    Example:
        ``ExactMatch(ignore_case=True)(samples)`` scores the response " Paris\\n" 1.0 for the answer "paris".
    """

    def __init__(self, strip: bool = True, ignore_case: bool = False, name: str = "exact_match") -> None:
        self.strip = strip
        self.ignore_case = ignore_case
        self.name = name

    def __call__(self, samples: list[Sample]) -> list[float]:
        """Return 1.0 or 0.0 per sample; a prompt without an answer is a ValueError."""
        return [
            float(self._normalise(sample.response) == self._normalise(_answer(sample, self.name))) for sample in samples
        ]

    def _normalise(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


class FormatReward:
    """1.0 where a regular expression matches the whole response, from its first to its last character.

    Args:
        pattern: regular expression in Python's syntax; "." matches no line break, unless it starts with "(?s)".
        name: what it is called in the logs.

    Raises:
        ValueError: a pattern that is no regular expression.

    Example:
        ``FormatReward("(?s)<think>.*</think>.*")(samples)`` scores responses that think first.
    """

    def __init__(self, pattern: str, name: str = "format") -> None:
        try:
            self.pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"the pattern {pattern!r} of the reward {name!r} is no regular expression, {error}: "
                "put a backslash before a character that stands for itself"
            ) from error
        self.name = name

    def __call__(self, samples: list[Sample]) -> list[float]:
        """Return 1.0 or 0.0 per sample."""
        return [float(self.pattern.fullmatch(sample.response) is not None) for sample in samples]


def _answer(sample: Sample, name: str) -> str:
    """Return the prompt's answer."""
    if sample.prompt.answer is None or not sample.prompt.answer.strip():
        raise ValueError(
            f"the reward {name!r} needs the answer to the prompt, but it is {sample.prompt.answer!r} for "
            f"{describe_sample(sample)}: map a column of the data set to `answer`"
        )
    return sample.prompt.answer


@functools.cache
def _math_verifier() -> MathVerifier:
    """One child process for all rewards of this process."""
    return MathVerifier()
