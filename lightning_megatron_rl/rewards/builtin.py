"""Rewards that compare the response with the prompt's answer: as mathematics, and as text."""

import functools

from lightning_megatron_rl.rewards.math_verifier import MathVerifier
from lightning_megatron_rl.rewards.text_rewards import prompt_answer
from lightning_megatron_rl.sample import Sample


def math_equal(samples: list[Sample]) -> list[float]:
    r"""1.0 where the last expression of the response (boxed ones first) equals the prompt's answer by math-verify.

    The answer is the final one alone, "72" or "2\sqrt{3}" (of GSM8K what follows "####"), without dollars or with them.
    One without mathematics in it is compared as stripped text, and so are a date and words with several numbers; of
    words with one, "18 dollars", the number counts. An unevaluated expression of the same value counts: "23+49" is
    right for "72". In a response it must stand between spaces, dollars or in \boxed{}: "<answer>72</answer>" contains
    none. A response that takes more than 5 s of CPU time to evaluate is wrong, with a warning. Works in every thread.

    Raises:
        RewardSetupError: a prompt without an answer.

    Example:
        For the answer "0.5" the response "It is $\frac{1}{2}$." scores 1.0.
    """
    answers = [prompt_answer(sample, "math_equal").strip() for sample in samples]
    return [
        float(answer == sample.final_text.strip() or _math_verifier().equal(answer, sample.final_text))
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
        """Return 1.0 or 0.0 per sample; a prompt without an answer is a RewardSetupError."""
        return [
            float(self._normalise(sample.final_text) == self._normalise(prompt_answer(sample, self.name)))
            for sample in samples
        ]

    def _normalise(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


@functools.cache
def _math_verifier() -> MathVerifier:
    """One child process for all rewards of this process."""
    return MathVerifier()
