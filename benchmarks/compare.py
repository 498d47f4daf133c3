"""The sides of a comparison: run them, check that they did the same work, and say in what they differ."""

from collections.abc import Iterator, Sequence
from typing import Any

from common import run_child
from peers import search_path


def run_sides(
    arguments: list[str], peers: Sequence[str], timeout_s: float, variants: Sequence[str] = ("plain",)
) -> Iterator[dict[str, Any]]:
    """Run ours, then each peer with the same arguments, and yield what is known after each.

    A peer that fails or hangs has the end of its output in its place: the other sides are not lost with it.

    Args:
        arguments: Of all sides.
        peers: "trl", "verl".
        timeout_s: Deadline of each run.
        variants: Of verl's settings; the fastest is its side.

    Raises:
        ValueError: Peers and several devices: they would run on one.
    """
    several = [argument for argument in arguments if argument.startswith("--devices=") and argument != "--devices=1"]
    if several and peers:
        raise ValueError(f"{several[0]} with --peer {', '.join(peers)}: peers run on one device; --peer none")
    sides: dict[str, Any] = {"ours": run_child("ours.py", arguments, timeout_s)}
    yield sides
    for peer in peers:
        sides[peer] = run_peer(peer, arguments, timeout_s, sides["ours"]["work"], variants)
        yield sides


def run_peer(
    peer: str, arguments: list[str], timeout_s: float, wanted: dict[str, Any], variants: Sequence[str] = ("plain",)
) -> dict[str, Any]:
    """Return a peer's side, with ``different_work``: in what its work is another than `wanted`; else why it failed.

    verl's is that of its fastest variant, with the median seconds of all of them in ``variants``.
    """
    if peer == "trl":
        return _measure("trl_peer.py", arguments, timeout_s, wanted)
    found = {}
    for variant in variants:
        more = [f"--verl-variant={variant}", f"--deadline={timeout_s - 30:g}"]  # it ends what it started by itself
        found[variant] = _measure("verl_peer.py", [*arguments, *more], timeout_s, wanted)
    told = {name: side["failed"] if "failed" in side else side["step_s"]["median"] for name, side in found.items()}
    done = [side for side in found.values() if "failed" not in side]
    best = min(done, key=lambda side: float(side["step_s"]["median"]), default=found[variants[0]])
    return {**best, "variants": told}


def _measure(script: str, arguments: list[str], timeout_s: float, wanted: dict[str, Any]) -> dict[str, Any]:
    try:
        side = run_child(script, arguments, timeout_s, path=search_path())
    except RuntimeError as error:
        return {"failed": str(error)}
    return {**side, "different_work": different_work(wanted, side["work"])}


def different_work(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return in what the work of two sides differs; empty where it is the same.

    Example:
        ``different_work({"samples": 256}, {"samples": 128}) == ["samples: 256 and 128"]``
    """
    told = {name: theirs.get(name, "not told") for name in ours}
    return [f"{name}: {ours[name]} and {told[name]}" for name in ours if ours[name] != told[name]]


def measured(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the peers of a result that were measured, by name."""
    return {name: result[name] for name in ("trl", "verl") if "failed" not in (result.get(name) or {"failed": ""})}
