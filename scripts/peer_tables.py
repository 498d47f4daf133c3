"""What other libraries take for the same work: the table that opens performance.md, and README's lines."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from results import RESULTS, Result, load, table

NAMES = {"trl": "TRL", "verl": "verl"}


class Row(NamedTuple):
    """One kind of work.

    Args:
        work: What is measured.
        unit: Of the figures.
        ours: This project's figure.
        theirs: By the peer; None: not measured.
        more_is_better: A rate, not seconds.
        result: Where it stands.
        dates: Of ours, and of peers that were measured on another day than ours.
    """

    work: str
    unit: str
    ours: float
    theirs: dict[str, float | None]
    more_is_better: bool
    result: Result
    dates: str

    def times(self, peer: str) -> float | None:
        """Return how many times as fast ours is."""
        other = self.theirs[peer]
        if other is None:
            return None
        return self.ours / other if self.more_is_better else other / self.ours


def rows(results: Path = RESULTS) -> list[Row]:
    """Return what was measured beside peers on GPUs."""
    return [*_steps(results), *_long_tail(results)]


def _steps(results: Path) -> Iterator[Row]:
    for _, result in load("grpo_step_*.json", results, gpus_only=True):
        theirs = {peer: _step(result.get(peer)) for peer in NAMES}
        if any(value is not None for value in theirs.values()):
            work = f"GRPO step, {result['ours']['shape']}, {_short(result['device'])}"
            yield Row(work, "s", result["ours"]["step_s"]["median"], theirs, False, result, result["date"])


def _long_tail(results: Path) -> Iterator[Row]:
    for _, result in load("long_tail_*.json", results, gpus_only=True):
        for row in result["rows"]:
            if not result.get("peers"):
                continue
            bound, apart = row["max_staleness"], row["placement"] == "separate"
            two = apart or row["devices"] > 1
            verl = f"verl, {'separate, ' if apart else ''}bound {bound}" if bound else "verl, synchronous"
            trl = "trl, two GPUs" if two else "trl"
            if bound:
                trl = f"trl, asynchronous, bound {bound}" if apart else ""
            sides = {
                "trl": result["peers"].get(trl),
                "verl": result["peers"].get(verl) if apart or not two else None,
            }
            theirs = {peer: _rate(side) for peer, side in sides.items()}
            if not any(theirs.values()):
                continue
            told = f"bound of staleness {bound}{row.get('sampler', '')}" if bound else "synchronous"
            gpus = f"two {_short(result['device'])}s" if two else _short(result["device"])
            work = f"long responses, {result['shape']}, {told}, {gpus}"
            yield Row(work, "samples/s", row["samples_per_s"], theirs, True, result, _dates(result, row, sides))


def _step(side: dict[str, Any] | None) -> float | None:
    return None if side is None or "failed" in side else float(side["step_s"]["median"])


def _rate(side: dict[str, Any] | None) -> float | None:
    return None if side is None else side.get("samples_per_s")


def _dates(result: Result, row: dict[str, Any], sides: dict[str, dict[str, Any] | None]) -> str:
    """Return the day of ours, and those of peers that were measured on another one."""
    ours = row.get("date", result["date"])
    days = {peer: side.get("date", result["date"]) for peer, side in sides.items() if side is not None}
    return "; ".join([ours, *(f"{NAMES[peer]} {day}" for peer, day in days.items() if day != ours)])


def _short(device: str) -> str:
    return device.removeprefix("NVIDIA ").split()[0]


def peers(results: Path = RESULTS) -> str:
    """Return the table of all work that was measured beside peers."""
    header = "| work, one GPU if not two | unit | this project | TRL | verl | date |"
    lines = []
    for row in rows(results):
        cells = [
            "–" if (other := row.theirs[peer]) is None else f"{other:.2f} ({row.times(peer):.2f} ×)" for peer in NAMES
        ]
        lines.append(f"| {row.work} | {row.unit} | {row.ours:.2f} | {cells[0]} | {cells[1]} | {row.dates} |")
    return table(header, lines)


def peer_lines(results: Path = RESULTS) -> str:
    """Return README's lines: how many times as fast, least and most, by peer, with their versions."""
    told = []
    for peer, name in NAMES.items():
        found = [(times, row) for row in rows(results) if (times := row.times(peer)) is not None]
        if found:
            least, most = (choose(found, key=lambda pair: pair[0]) for choose in (min, max))
            newest = max((row.result for _, row in found), key=lambda result: str(result["date"]))
            told.append(
                f"- {name} {newest['versions'][peer]}: {least[0]:.2f} × ({least[1].work}) to {most[0]:.2f} ×"
                f" ({most[1].work}) as fast, in {len(found)} kinds of work."
            )
    slower = [row.work for row in rows(results) for peer in NAMES if (row.times(peer) or 1.0) < 1.0]
    told.append(f"- Where a peer was faster: {'; '.join(slower) or 'in none of these'}.")
    return "\n".join(told) + "\n"
