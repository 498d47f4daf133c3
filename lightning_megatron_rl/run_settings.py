"""The settings of a run as plain data, for loggers and model cards, with what looks like a secret masked."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from inspect import isroutine, signature
from pathlib import Path
from typing import Any

MASK = "***"
_OURS = __name__.partition(".")[0]
_MOST_ITEMS, _MOST_LEVELS = 50, 6  # of a list; of objects in objects
# of a name's words, in snake_case
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:secrets?|passw(?:or)?d|passphrase|credentials?)(?:_|$)"
    r"|(?:^|_)(?:auth|authorization|bearer|cookie|(?:api|access|private|account|license)_?keys?)$"
    r"|(?:^|_)(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)(?<!mask_)(?<!stop_)token$"
)
_SECRET_VALUE = re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{8,}")
_URL_PASSWORD = re.compile(r"(?<=://)([^/@\s:]+):[^/@\s]+(?=@)")


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

    Example:
        ``{"class": "GRPOModule", "num_generations": 8, "sampling": {"temperature": 1.0, ...}, ...}``
    """
    return masked(_described(owner, ()))


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


def masked(value: Any, name: str = "") -> Any:
    """Return plain data with what looks like a secret replaced by ``***``: by its name, or by its own form.

    Example:
        ``masked({"HF_TOKEN": "hf_abcdefghij", "max_tokens": 9})`` is ``{"HF_TOKEN": "***", "max_tokens": 9}``
    """
    if isinstance(value, Mapping):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, name) for item in value]
    if isinstance(value, str):
        words = re.sub(r"(?<=[a-z])(?=[A-Z])|[^A-Za-z0-9]+", "_", name)
        is_key = words.isupper() and words.endswith("_KEY")  # an environment variable
        if value and (is_key or _SECRET_NAME.search(words.lower())):
            return MASK
        return _URL_PASSWORD.sub(rf"\1:{MASK}", _SECRET_VALUE.sub(MASK, value))
    return value
