"""Looks up an algorithm that a user named in a config."""

from collections.abc import Mapping


def lookup[T](registry: Mapping[str, T], name: str, kind: str) -> T:
    """Return `registry[name]`; an unknown name is a ValueError that lists the known ones of this `kind`.

    Example:
        ``lookup({"k3": k3}, "k4", "KL estimator")`` raises "unknown KL estimator 'k4': choose one of k3".
    """
    if name not in registry:
        raise ValueError(f"unknown {kind} {name!r}: choose one of {', '.join(sorted(registry))}")
    return registry[name]
