"""JSON that can be in a page."""

import json
import math
from collections.abc import Mapping
from typing import Any


def embed(value: Any) -> str:
    """Return JSON that can be in a script element: nothing in it ends the element or begins another.

    What is no finite number becomes null.
    """
    text = json.dumps(_finite(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
