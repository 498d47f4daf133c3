"""Both sides of a comparison: run them, check that they did the same work, and say by how much they differ."""

import importlib.util
from collections.abc import Iterator
from typing import Any

from common import run_child


def run_sides(arguments: list[str], peer: str, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Run ours, then the peer with the same arguments, and yield what is known after each.

    Args:
        arguments: Of both sides.
        peer: "trl", "none", or "auto": TRL if it is installed and there is one device; if it fails, the end of its
            output takes its place.
        timeout_s: Deadline of each side.

    Raises:
        ValueError: "trl" with several devices: it would run on one.
    """
    several = any(argument.startswith("--devices=") and argument != "--devices=1" for argument in arguments)
    if several and peer == "trl":
        raise ValueError("--peer trl runs on one device: --devices 1, or --peer none")
    sides: dict[str, Any] = {"ours": run_child("ours.py", arguments, timeout_s)}
    yield sides  # our own measurements are not lost with the peer's
    found = importlib.util.find_spec("trl") is not None and not several
    if peer == "trl" or (peer == "auto" and found):
        try:
            sides["trl"] = run_child("trl_peer.py", arguments, timeout_s)
            sides["different_work"] = different_work(sides["ours"]["work"], sides["trl"]["work"])
        except RuntimeError as error:
            if peer == "trl":
                raise
            sides["trl_failed"] = str(error)
        yield sides


def different_work(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return in what the work of two sides differs; empty where it is the same.

    Example:
        ``different_work({"samples": 256}, {"samples": 128}) == ["samples: 256 and 128"]``
    """
    told = {name: theirs.get(name, "not told") for name in ours}
    return [f"{name}: {ours[name]} and {told[name]}" for name in ours if ours[name] != told[name]]
