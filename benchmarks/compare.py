"""The sides of a comparison: run them, check that they did the same work, and say in what they differ."""

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import gpus
from common import run_child
from peers import search_path

Started = dict[str, Future[dict[str, Any]]]  # by the variant of settings


class Sides:
    """Runs sides in processes of their own, in the order in which they are started; leaving it, nothing more starts.

    Args:
        at_once: So many at a time; more than one: each on GPUs of its own.

    Raises:
        ValueError: Several at a time on a machine without GPUs.
    """

    def __init__(self, at_once: int = 1) -> None:
        if at_once > 1 and not gpus.visible():
            raise ValueError(f"--at-once {at_once}: each side wants a GPU of its own, and there is none. Leave it out")
        self._pool, self._apart = ThreadPoolExecutor(at_once), at_once > 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def start(
        self, script: str, arguments: Sequence[str], timeout_s: float, path: Sequence[str] = (), devices: int = 1
    ) -> Future[dict[str, Any]]:
        """Start a script of this folder when its turn comes.

        Args:
            script: Its name.
            arguments: Its arguments.
            timeout_s: Its deadline, from its own start.
            path: Folders in which it finds packages that the environment lacks.
            devices: GPUs that it needs.
        """
        return self._pool.submit(self._run, script, [*arguments], timeout_s, path, devices)

    def _run(
        self, script: str, arguments: list[str], timeout_s: float, path: Sequence[str], devices: int
    ) -> dict[str, Any]:
        if not self._apart:
            return run_child(script, arguments, timeout_s, path=path)
        with gpus.own_gpus(devices) as names:
            return run_child(script, arguments, timeout_s, path=path, gpus=names)


def run_sides(
    arguments: list[str],
    peers: Sequence[str],
    timeout_s: float,
    variants: Sequence[str] = ("plain",),
    at_once: int = 1,
) -> Iterator[dict[str, Any]]:
    """Run ours, then each peer with the same arguments, and yield what is known after each.

    A peer that fails or hangs has the end of its output in its place: the other sides are not lost with it.

    Args:
        arguments: Of all sides.
        peers: "trl", "verl".
        timeout_s: Deadline of each run.
        variants: Of verl's settings; the fastest is its side.
        at_once: Runs at a time, each on a GPU of its own.

    Raises:
        ValueError: Peers and several devices: they would run on one.
    """
    several = [argument for argument in arguments if argument.startswith("--devices=") and argument != "--devices=1"]
    if several and peers:
        raise ValueError(f"{several[0]} with --peer {', '.join(peers)}: peers run on one device; --peer none")
    with Sides(at_once) as pool:
        ours = pool.start("ours.py", arguments, timeout_s)
        started = {peer: start_peer(pool, peer, arguments, timeout_s, variants) for peer in peers}
        sides: dict[str, Any] = {"ours": ours.result()}
        yield sides
        for peer, runs in started.items():
            sides[peer] = peer_side(peer, runs, sides["ours"]["work"])
            yield sides


def start_peer(
    pool: Sides,
    peer: str,
    arguments: list[str],
    timeout_s: float,
    variants: Sequence[str] = ("plain",),
    devices: int = 1,
) -> Started:
    """Start a peer's side, for verl with each variant of its settings, TRL's asynchronous trainer with a --bound."""
    if peer == "trl":
        script = "trl_async_peer.py" if any(word.startswith("--bound=") for word in arguments) else "trl_peer.py"
        return {"": pool.start(script, [*arguments, f"--devices={devices}"], timeout_s, search_path(), devices)}
    deadline = f"--deadline={timeout_s - 30:g}"  # it ends what it started by itself
    return {
        name: pool.start(
            "verl_peer.py", [*arguments, f"--verl-variant={name}", deadline], timeout_s, search_path(), devices
        )
        for name in variants
    }


def peer_side(peer: str, started: Started, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return a peer's side, with ``different_work``: in what its work is another than `wanted`; else why it failed.

    verl's is that of its fastest variant, with the median seconds of all of them in ``variants``.
    """
    found = {name: _measured(run, wanted) for name, run in started.items()}
    if peer == "trl":
        return found[""]
    told = {name: side["failed"] if "failed" in side else side["step_s"]["median"] for name, side in found.items()}
    done = [side for side in found.values() if "failed" not in side]
    best = min(done, key=lambda side: float(side["step_s"]["median"]), default=next(iter(found.values())))
    return {**best, "variants": told}


def _measured(run: Future[dict[str, Any]], wanted: dict[str, Any]) -> dict[str, Any]:
    try:
        side = run.result()
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


def add_at_once(parser: argparse.ArgumentParser) -> None:
    """Add how many sides run at a time."""
    parser.add_argument(
        "--at-once", type=int, default=1, help="sides at a time, on GPUs and CPU cores of their own; one for a CPU"
    )
