"""Finds an algorithm that a user named in a config."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor

Returned = Any
"""What a Protocol of a user's callable returns, if it is a class: jsonargparse would take such a Protocol for one of
factories of that class, and refuse a `class_path` of callable objects."""


def lookup[T](registry: Mapping[str, T], name: str, kind: str) -> T:
    """Return `registry[name]`; an unknown name is a ValueError that lists the known ones of this `kind`."""
    if name not in registry:
        raise ValueError(f"unknown {kind} {name!r}: choose one of {', '.join(sorted(registry))}")
    return registry[name]


def choose[T: Callable[..., Any]](
    registry: Mapping[str, T], choice: str | T, kind: str, arguments: Sequence[str] = ()
) -> T:
    """Return the algorithm that is meant: by its name, by the dotted path of a function or class, or itself.

    Args:
        registry: What there is by name.
        choice: A name, a dotted path (a class is built without arguments), or a callable of the user's own.
        kind: What it is, for errors.
        arguments: Names of the positional arguments that it will be called with.

    Raises:
        ValueError: An unknown name, with those that exist; a path that cannot be imported; something that cannot be
            called with the arguments.
    """
    if isinstance(choice, str) and (choice in registry or "." not in choice):
        return lookup(registry, choice, kind)
    found: Any = _import(choice, registry, kind) if isinstance(choice, str) else choice
    if not callable(found):
        raise ValueError(f"{kind} {choice!r} is a {type(found).__name__}, which cannot be called: name a function")
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"{kind} {choice!r} is called with ({', '.join(arguments)}), but it does not take them: {error}"
        ) from error
    return found


def by_name[T](registry: Mapping[str, T], choice: str | T, found: T) -> str | T:
    """Return the name of an algorithm of the registry that was given as itself or by its path, otherwise `choice`."""
    return next((name for name, known in registry.items() if known is found), choice)


def check_per_token(kind: str, choice: Any, shape: Sequence[int], **returned: Any) -> None:
    """Refuse what an algorithm of a user's own returned, unless it is a tensor with a value for each token.

    A mean over the tokens, say, would be spread over all of them again, padding included.

    Raises:
        ValueError: With what came, and the shape that was to come.
    """
    for name, values in returned.items():
        found = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        if found != list(shape):
            raise ValueError(
                f"{kind} {choice!r} returned {name} of shape {found} for tokens of shape {list(shape)}: return a tensor"
                " with a value for each token; they are averaged later, over all micro-batches and replicas"
            )


def _import(path: str, registry: Mapping[str, Any], kind: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{kind} {path!r} cannot be imported ({error}): choose one of {', '.join(sorted(registry))}, or give the"
            " dotted path of a function in a module that Python finds (PYTHONPATH)"
        ) from error
    if not inspect.isclass(found):
        return found
    try:
        return found()
    except TypeError as error:
        raise ValueError(
            f"{kind} {path!r} cannot be built without arguments ({error}): write it as class_path with init_args"
        ) from error
