"""Classes of settings: what Python code gives has none of the command line's checks of types."""

from collections.abc import Mapping
from typing import Any


def check_kinds(kinds: Mapping[str, type], values: Mapping[str, Any], owner: str) -> None:
    """Refuse the first value that is no object of its class; None is a setting that is not given.

    Args:
        kinds: Classes by the name of the setting.
        values: Settings by their names, such as `locals()` or `vars(self)`; others are left alone.
        owner: What the settings belong to, for the error.

    Raises:
        TypeError: With the name, both classes and how to make the right one.

    Example:
        ``check_kinds({"lora": LoRASettings}, {"lora": {"rank": 8}}, "train")`` raises
        "train: lora is to be LoRASettings(...), not a dict."
    """
    for name, kind in kinds.items():
        value = values[name]
        if value is None or isinstance(value, kind):
            continue
        if isinstance(value, type):
            raise TypeError(f"{owner}: {name} is the class {value.__name__} itself: give an object of it.")
        raise TypeError(f"{owner}: {name} is to be {kind.__name__}(...), not a {type(value).__name__}.")
