"""Versions of what is installed."""

from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"  # of this package, as pyproject.toml has it
_OWN = "lightning-megatron-rl"


@cache
def installed_version(name: str) -> str | None:
    """Return the version of a distribution, None if it is not installed; this one need not be (`PYTHONPATH`)."""
    if name == _OWN:
        return __version__
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    found = {name: installed_version(name) for name in names}
    return {name: number for name, number in found.items() if number is not None}
