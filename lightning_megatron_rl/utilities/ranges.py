"""Ranges of numeric settings, and words: each class states its own in a table, one function for each checks them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, get_args


@dataclass(frozen=True)
class Range:
    """The values that a number may have. A value that is not a finite number is outside every range.

    Args:
        least: Smallest value; None for none.
        above: Value that it must exceed; None for none.
        most: Largest value; None for none.
        below: Value that it must stay under; None for none.
        whole: Whether it must be an integer.
        note: What the number is or what to do, for the error.

    Example:
        ``Range(least=1, whole=True).problem(0) == "must be at least 1"``; ``Range(above=0).problem(0.5) is None``
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    whole: bool = False
    note: str = ""

    def called(self, note: str) -> "Range":
        """Return the same range with another note."""
        return replace(self, note=note)

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with `value`, or None."""
        if isinstance(value, bool) or not isinstance(value, Real):
            return f"must be a number, not a {type(value).__name__}"
        number = float(value)
        if not math.isfinite(number):
            return f"must be a finite number{self._bounds()}"
        if self.whole and not number.is_integer():
            return f"must be a whole number{self._bounds()}"
        inside = (
            (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
        )
        return None if inside else f"must be{self._bounds()}"

    def _bounds(self) -> str:
        low, high = self.least if self.above is None else self.above, self.most if self.below is None else self.below
        if low is not None and high is not None:
            return f" in {'[' if self.above is None else '('}{low:g}, {high:g}{']' if self.below is None else ')'}"
        if low is not None:
            return f" {'at least' if self.above is None else 'above'} {low:g}"
        if high is not None:
            return f" {'at most' if self.below is None else 'below'} {high:g}"
        return ""


FINITE = Range()
POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(least=0)
COUNT = Range(least=1, whole=True)
COUNT_OR_NONE = Range(least=0, whole=True)  # 0 for none
SHARE = Range(least=0, most=1)
PROBABILITY = Range(least=0, below=1)
SEED = Range(least=0, below=2**63, whole=True)


def check_ranges(ranges: Mapping[str, Range], values: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse the first value that is outside its range; None is a setting that is not given.

    Args:
        ranges: By the name of the setting. Items of a list, tuple or dict are checked one by one.
        values: Settings by their names, such as `locals()` or `vars(self)`; others are left alone.
        prefix: What the settings belong to, for the error, such as "lora.".

    Raises:
        ValueError: With the name, the value, the range and the note.

    Example:
        ``check_ranges({"rank": COUNT}, {"rank": 0}, "lora.")`` raises "lora.rank=0 must be at least 1".
    """
    for name, allowed in ranges.items():
        given = values[name]
        items = given.values() if isinstance(given, dict) else given if isinstance(given, list | tuple) else [given]
        for value in items:
            problem = None if value is None else allowed.problem(value)
            if problem is not None:
                inside = f" (in {given!r})" if isinstance(given, list | tuple | dict) else ""
                note = f": {allowed.note}" if allowed.note else ""
                raise ValueError(f"{prefix}{name}={value!r}{inside} {problem}{note}.")


def check_words(choices: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse the first setting that is none of its words: Python does not look at annotations.

    Args:
        choices: The `Literal` of each setting, by its name.
        values: Settings by their names, such as `locals()` or `vars(self)`; others are left alone.
        prefix: What the settings belong to, for the error.

    Raises:
        ValueError: With the name, the value and the words.

    Example:
        ``check_words({"kl_in": Literal["loss", "reward"]}, {"kl_in": "rewards"})`` raises "kl_in='rewards': choose one
        of loss, reward."
    """
    for name, words in choices.items():
        if values[name] not in get_args(words):
            raise ValueError(f"{prefix}{name}={values[name]!r}: choose one of {', '.join(get_args(words))}.")
