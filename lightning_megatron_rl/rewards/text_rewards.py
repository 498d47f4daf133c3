"""Rewards of the response's text: its form, the answer in a pattern, JSON by a schema, and its length."""

import functools
import re
from pathlib import Path
from typing import Any

from lightning_megatron_rl.rewards.base import RewardSetupError, describe_sample
from lightning_megatron_rl.rewards.limited_child import LimitedChild, RequestError
from lightning_megatron_rl.sample import Sample
from lightning_megatron_rl.utilities.notices import tell_loss
from lightning_megatron_rl.utilities.ranges import COUNT, COUNT_OR_NONE, check_ranges
from lightning_megatron_rl.utilities.text_files import read_json

WORKER = Path(__file__).with_name("text_worker.py")


class FormatReward:
    """1.0 where a regular expression matches the whole response, from its first to its last character.

    Matching runs in a child process: some patterns take for ever on some texts, with the interpreter's lock held. A
    response that takes more than 5 s of CPU time does not match, with a warning.

    Args:
        pattern: regular expression in Python's syntax; "." matches no line break, unless it starts with "(?s)".
        name: what it is called in the logs.

    Raises:
        ValueError: a pattern that is not a regular expression.

    Example:
        ``FormatReward("(?s)<think>.*</think>.*")(samples)`` scores responses that think first.
    """

    def __init__(self, pattern: str, name: str = "format") -> None:
        self.pattern = _checked_pattern(pattern, name)
        self.name = name

    def __call__(self, samples: list[Sample]) -> list[float]:
        """Return 1.0 or 0.0 per sample."""
        return [float(bool(_ask("fullmatch", self.pattern, sample, self.name))) for sample in samples]


class PatternAnswer:
    """1.0 where the first group of a pattern's last match is the prompt's answer.

    Spaces at both ends of either are left out. As with `FormatReward` the matching is limited to 5 s of CPU time.

    Args:
        pattern: regular expression with one group, or with none for the whole match.
        ignore_case: whether upper and lower case are the same.
        name: what it is called in the logs.

    Raises:
        ValueError: a pattern that is not a regular expression, or has several groups.
    """

    def __init__(self, pattern: str, ignore_case: bool = False, name: str = "pattern_answer") -> None:
        self.pattern = _checked_pattern(pattern, name)
        groups = re.compile(pattern).groups
        if groups > 1:
            raise ValueError(
                f"the pattern {pattern!r} of the reward {name!r} has {groups} groups: write (?:...) for all but the "
                "one that holds the answer"
            )
        self.ignore_case = ignore_case
        self.name = name

    def __call__(self, samples: list[Sample]) -> list[float]:
        """Return 1.0 or 0.0 per sample; a prompt without an answer is a RewardSetupError."""
        answers = [self._normalise(prompt_answer(sample, self.name)) for sample in samples]
        found = [_ask("last_group", self.pattern, sample, self.name) for sample in samples]
        return [
            float(text is not None and self._normalise(text) == answer)
            for text, answer in zip(found, answers, strict=True)
        ]

    def _normalise(self, text: str) -> str:
        return text.strip().casefold() if self.ignore_case else text.strip()


class JSONSchemaReward:
    """1.0 where the whole response is JSON that a schema accepts.

    Args:
        schema: JSON Schema (2020-12, unless its "$schema" says otherwise), or the path of a file with one.
        name: what it is called in the logs.

    Raises:
        ValueError: a file that cannot be read as JSON, or an invalid schema.

    Example:
        ``JSONSchemaReward({"type": "object", "required": ["city"]})`` scores the response '{"city": "Oslo"}' 1.0.
    """

    def __init__(self, schema: dict[str, Any] | str, name: str = "json_schema") -> None:
        from jsonschema import validators
        from jsonschema.exceptions import SchemaError

        if isinstance(schema, str):
            try:
                schema = read_json(schema)
            except ValueError as error:
                raise ValueError(f"the schema {schema!r} of the reward {name!r} cannot be read: {error}") from error
        try:
            validators.validator_for(schema, validators.Draft202012Validator).check_schema(schema)
        except SchemaError as error:
            raise ValueError(f"the schema of the reward {name!r} is no JSON Schema: {error.message}") from error
        self.schema = schema
        self.name = name

    def __call__(self, samples: list[Sample]) -> list[float]:
        """Return 1.0 or 0.0 per sample; a schema that names another which is not there is a RewardSetupError."""
        found = [_ask("schema", self.schema, sample, self.name) for sample in samples]
        for said in found:
            if isinstance(said, str):
                raise RewardSetupError(
                    f"the schema of the reward {self.name!r} names another that is not there: {said}: put it under"
                    " $defs"
                )
        return [float(bool(said)) for said in found]


class LengthPenalty:
    """0 up to `free_tokens`, then falling linearly to -1 at `max_tokens` and beyond.

    The soft punishment of overlong responses in DAPO (arXiv 2503.14476, equation 13) is this with free_tokens =
    L_max - L_cache and max_tokens = L_max.

    Args:
        free_tokens: length that costs nothing, the end-of-sequence token included. # [tokens]
        max_tokens: length that costs 1, usually `sampling.max_tokens`. # [tokens]
        name: what it is called in the logs.

    Raises:
        ValueError: unless 0 <= free_tokens < max_tokens.

    Example:
        ``LengthPenalty(100, 200)`` scores a response of 150 tokens -0.5.
    """

    def __init__(self, free_tokens: int, max_tokens: int, name: str = "length_penalty") -> None:
        ranges = {"free_tokens": COUNT_OR_NONE, "max_tokens": COUNT}
        check_ranges(ranges, locals(), f"reward {name!r}: ")
        if free_tokens >= max_tokens:
            raise ValueError(
                f"free_tokens={free_tokens}, max_tokens={max_tokens} of the reward {name!r}: it falls from 0 at the "
                "first to -1 at the second, so 0 <= free_tokens < max_tokens"
            )
        self.free_tokens = free_tokens
        self.max_tokens = max_tokens
        self.name = name

    def __call__(self, samples: list[Sample]) -> list[float]:
        """Return a number in [-1, 0] per sample."""
        span = self.max_tokens - self.free_tokens
        return [-min(max((len(sample.policy_ids) - self.free_tokens) / span, 0.0), 1.0) for sample in samples]


def prompt_answer(sample: Sample, name: str) -> str:
    """Return the answer to the sample's prompt, for the reward `name`.

    Raises:
        RewardSetupError: there is none.
    """
    if sample.prompt.answer is None or not sample.prompt.answer.strip():
        raise RewardSetupError(
            f"the reward {name!r} needs the answer to the prompt, but it is {sample.prompt.answer!r} for "
            f"{describe_sample(sample)}: map a column of the data set to `answer`"
        )
    return sample.prompt.answer


def _checked_pattern(pattern: str, name: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"the pattern {pattern!r} of the reward {name!r} is no regular expression, {error}: "
            "put a backslash before a character that stands for itself"
        ) from error
    return pattern


def _ask(kind: str, rule: Any, sample: Sample, name: str) -> Any:
    try:
        return text_child().ask([kind, rule, sample.final_text])
    except RequestError as error:
        tell_loss(f"the reward {name!r} on {describe_sample(sample)} {error}: 0")
        return None


@functools.cache
def text_child() -> LimitedChild:
    """Return the child process that all rewards of this process match in."""
    return LimitedChild(WORKER)
