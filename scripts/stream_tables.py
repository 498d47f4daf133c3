"""The tables of streams: B4 in results.md, learning curves in asynchronous.md, drills in kill_drills.md."""

import statistics
from pathlib import Path
from typing import Any

from results import RESULTS, Result, load, spread, table


def long_tail(results: Path = RESULTS) -> str:
    """Return the table of B4."""
    header = (
        "| device | model | sampler, `max_staleness` | samples/s | step, s | trainer idle | sampler idle"
        " | greatest staleness | times synchronous | simulated | CPUs that others kept busy |"
    )
    rows = []
    for _, result in load("long_tail_*.json", results):
        for row in result["rows"]:
            devices = "" if row["devices"] == 1 else f" on {row['devices']} {'GPUs' if result['cuda'] else 'cores'}"
            placement = row["placement"] or "synchronous"
            side = f"{placement}{devices}, {row['max_staleness']}{row.get('sampler', '')}"
            sampler = "–" if row["sampler_idle"] is None else f"{row['sampler_idle']:.0%}"
            simulated = "–" if row["simulated_speedup"] is None else f"{row['simulated_speedup']:.2f}"
            others = "–" if row["others_cpus"] is None else f"{row['others_cpus']:.1f}"
            rows.append(
                f"| {result['device']} | {result['shape']} | {side} | {row['samples_per_s']:.1f}"
                f" | {spread(row['step_s'], 2)} | {row['trainer_idle']:.0%} | {sampler}"
                f" | {row['staleness_max']:.0f} | {row['speedup']:.2f} | {simulated} | {others} |"
            )
        rows += _peers(result)
    return table(header, rows)


def _peers(result: Result) -> list[str]:
    """Return the rows of peers in a result of B4; those that failed have none."""
    base = next(row["samples_per_s"] for row in result["rows"] if not row["max_staleness"])
    lines = []
    for name, side in result.get("peers", {}).items():
        if "samples_per_s" in side:
            called = name.replace("trl", "TRL" if "asynchronous" in name else "TRL, synchronous")
            oldest = (side.get("staleness") or {"max": 0.0})["max"]
            lines.append(
                f"| {result['device']} | {result['shape']} | {called}"
                f" | {side['samples_per_s']:.1f} | {spread(side['step_s'], 2)} | – | – | {oldest:.0f}"
                f" | {side['samples_per_s'] / base:.2f} | – | – |"
            )
    return lines


def stream_curves(results: Path = RESULTS) -> str:
    """Return the table of learning curves: means over seeds, and how likely by chance the difference is."""
    header = "| sampler, `max_staleness` | staleness, mean | accuracy, mean of the run | p | at the end | p |"
    rows = []
    for _, result in load("stream_curves.json", results):
        ages = result["staleness_mean"]
        rows += [_curve(name, found, ages.get(name, 0)) for name, found in result["comparison"].items()]
    for _, result in load("stream_curves_reference.json", results):
        for delay, found in result["comparison"].items():
            ages = [min(number, int(delay)) for number in range(result["rollouts"])]
            rows.append(_curve(f"`reference_grpo.py`, {delay} behind", found, statistics.fmean(ages)))
    return table(header, rows)


def _curve(name: str, found: dict[str, Any], staleness: float) -> str:
    """Return the row of one variant; those with no staleness are what others are compared with."""
    cells = []
    for value in (found["mean_accuracy"], found["final_accuracy"]):
        chance = f"{value['p_value']:.3f}" if staleness else "–"
        cells.append(f"{value['mean']:.3f} ± {value['std']:.3f} | {chance}")
    return f"| {name} | {staleness:.2f} | {cells[0]} | {cells[1]} |"


def stream_kill_drill(results: Path = RESULTS) -> str:
    """Return the table of the kill drills, a row for each point."""
    rows = []
    for _, result in load("stream_kill_drill.json", results):
        found: dict[str, dict[str, str]] = {}
        for line in result["drills"]:
            placement, _, point = line["point"].partition(": ")
            found.setdefault(point, {})[placement] = str(len(line["problems"]) or "none")
        rows += [f"| {point} | {_of_both(p)} |" for point, p in found.items()]
    return table("| killed at | problems |", rows)


def _of_both(problems: dict[str, str]) -> str:
    """Return the problems of a point once, if both placements have been there with as many."""
    placements = ("separate", "shared")
    told = {problems.get(placement, "not run") for placement in placements}
    return told.pop() if len(told) == 1 else "; ".join(f"{p}: {problems.get(p, 'not run')}" for p in placements)


def cluster_drill(results: Path = RESULTS) -> str:
    """Return the table of the drills of servers on other hosts, a row for each event."""
    rows = []
    for _, result in load("cluster_drill.json", results):
        for line in result["drills"]:
            cells = [line.get(name) for name in ("noticed_s", "goes_on_s", "lost", "repeated")]
            told = " | ".join("–" if cell is None else f"{cell:g}" for cell in cells)
            push = f": a push takes {line['push_s']:g} s, not {line['push_before_s']:g} s" if "push_s" in line else ""
            rows.append(f"| {line['event']}{push} | {told} | {len(line['problems']) or 'none'} |")
    header = "| what happened | noticed after, s | goes on after, s | responses lost | repeated | problems |"
    return table(header, rows)
