"""Faults for drills: a process that ends itself, without a word, where a named function starts or returns."""

import os
import signal
import sys
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal

_TOOL = 4  # of `sys.monitoring`: one that neither coverage nor a debugger takes


@dataclass(frozen=True)
class Point:
    """A moment of a run: the n-th time that a function starts or returns on some ranks.

    Args:
        name: What happens there, for the report.
        file: End of the path of the function's file.
        function: Its qualified name.
        moment: Before its first line, or when it returns.
        occurrence: Which call, counted from 1 in the process.
        ranks: Those that end.

    Example:
        ``Point("optimizer step", "strategy/optimizer.py", "MegatronOptimizer.step", occurrence=3, ranks=(1,))``
    """

    name: str
    file: str
    function: str
    moment: Literal["start", "return"] = "start"
    occurrence: int = 1
    ranks: tuple[int, ...] = (0, 1)

    def is_of(self, code: CodeType) -> bool:
        """Whether `code` is the function."""
        return code.co_qualname == self.function and code.co_filename.endswith(self.file)


def die_at(point: Point) -> None:
    """Have this process end itself by SIGKILL at `point`.

    Nothing of the product is replaced: the interpreter reports where functions start, and code that is not meant is
    reported once only.
    """
    monitoring = sys.monitoring
    event = monitoring.events.PY_START if point.moment == "start" else monitoring.events.PY_RETURN
    calls = 0

    def look(code: CodeType, *_: Any) -> Any:
        nonlocal calls
        if not point.is_of(code):
            return monitoring.DISABLE
        calls += 1
        if calls == point.occurrence:
            os.kill(os.getpid(), signal.SIGKILL)
        return None

    monitoring.use_tool_id(_TOOL, "drill")
    monitoring.register_callback(_TOOL, event, look)
    monitoring.set_events(_TOOL, event)
