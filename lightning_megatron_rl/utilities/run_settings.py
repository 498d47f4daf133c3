"""The settings of a run as plain data, for loggers and model cards, with what looks like a secret masked."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from inspect import isroutine, signature
from pathlib import Path
from typing import Any

from lightning_megatron_rl.utilities.masking import mask_secrets

_OURS = __name__.partition(".")[0]
_MOST_ITEMS, _MOST_LEVELS = 50, 6  # of a list; of objects in objects


def kept_arguments(owner: Any) -> dict[str, Any]:
    """Return what an object keeps of the arguments it was made with, by the names of its attributes.

    An argument ``optimizer`` is kept as ``optimizer`` or, for example, ``optimizer_config``.
    """
    makers = [vars(kind)["__init__"] for kind in type(owner).__mro__[:-1] if "__init__" in vars(kind)]
    arguments = {name for maker in makers for name in signature(maker).parameters} - {"self", "args", "kwargs"}
    return {
        name: value
        for name, value in vars(owner).items()
        if name in arguments or any(name.startswith(f"{argument}_") for argument in arguments)
    }


def set_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass: of one that is not this package's those that differ from their defaults.

    Megatron's `OptimizerConfig` has a hundred.
    """
    ours = type(value).__module__.startswith(_OURS)
    return {field.name: getattr(value, field.name) for field in fields(value) if ours or not _is_default(field, value)}


def _is_default(field: Any, owner: Any) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return bool(getattr(owner, field.name) == default)


def describe_settings(owner: Any) -> dict[str, Any]:
    """Return an object's class and settings as nested plain data, secrets masked.

    Args:
        owner: A module, data module, strategy, engine, reward, ...
    """
    settings: dict[str, Any] = mask_secrets(_described(owner, ()))
    return settings


def _described(owner: Any, inside: tuple[int, ...]) -> dict[str, Any]:
    found = {"class": _name(type(owner))}
    for name, value in sorted(kept_arguments(owner).items()):
        if not name.startswith("_"):
            found[name] = _plain(value, (*inside, id(owner)))
    return found


def _plain(value: Any, inside: tuple[int, ...]) -> Any:
    """A value as numbers, texts, lists and dictionaries of them."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if id(value) in inside or len(inside) >= _MOST_LEVELS:
        return _name(type(value))
    inside = (*inside, id(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item, inside) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        if len(value) > _MOST_ITEMS:
            return f"{len(value)} items"
        return [_plain(item, inside) for item in value]
    if isinstance(value, partial):
        named = {"function": _name(value.func), **{key: _plain(item, inside) for key, item in value.keywords.items()}}
        return named | ({"arguments": _plain(value.args, inside)} if value.args else {})
    if isinstance(value, type) or isroutine(value):
        return _name(value)
    if is_dataclass(value):
        return {name: _plain(item, inside) for name, item in set_fields(value).items()}
    if _is_large(value) or not hasattr(value, "__dict__"):
        return _name(type(value))
    return _described(value, inside)


def _is_large(value: Any) -> bool:
    """Whether it is a network, a tensor or the run itself, which are no settings."""
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__}
    return bool(names & {"torch.nn.modules.module.Module", "torch.Tensor", "lightning.pytorch.trainer.trainer.Trainer"})


def _name(value: Any) -> str:
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", str(value))
    return name if module == "builtins" or module.startswith(_OURS) else f"{module}.{name}"
