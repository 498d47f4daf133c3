"""Which parameters of a test run by default: the rest is behind the marker `slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def by_default(default: Iterable[Any], values: Iterable[Any], *, several: bool = False) -> list[Any]:
    """Return `values` as parameters, those that are not in `default` marked `slow`; `several`: tuples of arguments.

    Example:
        ``@pytest.mark.parametrize("layout", by_default(["tp2"], LAYOUTS))``
    """
    chosen, values = set(default), list(values)
    assert chosen <= set(values), chosen - set(values)
    return [
        value if value in chosen else pytest.param(*(value if several else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
