"""Reading benchmarks/results, and how figures are written in the documents' tables."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Result = dict[str, Any]


def load(pattern: str, results: Path = RESULTS, *, gpus_only: bool = False) -> list[tuple[str, Result]]:
    """Return the results whose file names match, by name: GPUs before CPUs."""
    files = sorted(results.glob(pattern), key=lambda file: ("cpu" in file.stem, file.stem))
    return [(file.stem, json.loads(file.read_text())) for file in files if not (gpus_only and "cpu" in file.stem)]


def share(value: dict[str, Any] | None) -> str:
    """Return a share as per cent, a dash where there is none."""
    return "–" if value is None else f"{value['median']:.1%}"


def spread(value: dict[str, Any], digits: int, scale: float = 1.0) -> str:
    """Return a median, times `scale`, with the half-width of the measurements' range as a share of it."""
    return f"{value['median'] * scale:,.{digits}f} ± {value['spread']:.0%}"


def split(measured: dict[str, Any]) -> str:
    """Return the layout, to stand behind the device, if it is of several GPUs."""
    layout = measured.get("layout", "world 1 ")
    return "" if layout.startswith("world 1 ") else f", {layout}"


def put_between(text: str, name: str, content: str) -> str:
    """Return a document with `content` between the marks of this name.

    Example:
        ``put_between("<!-- a -->\\nold\\n<!-- end of a -->\\n", "a", "new\\n")`` has "new" in place of "old".
    """
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, rest = text.split(start)
    return before + start + content + end + rest.split(end)[1]


def table(header: str, rows: Iterable[str]) -> str:
    """Return a table in Markdown.

    Example:
        ``table("| a | b |", ["| 1 | 2 |"])`` has a line ``|---|---|`` between the two.
    """
    return "\n".join([header, "|" + "---|" * (header.count("|") - 1), *rows]) + "\n"
