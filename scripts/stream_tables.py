"""The tables of results.md (B4, steps with a long tail) and of kill_drills.md (streams, servers on other hosts)."""

from pathlib import Path

from results import RESULTS, load, spread, table


def long_tail(results: Path = RESULTS) -> str:
    """Return the table of B4."""
    header = (
        "| device | model | sampler, `max_staleness` | samples/s | step, s | trainer idle | sampler idle"
        " | greatest staleness | times synchronous | simulated | CPUs that others kept busy |"
    )
    rows = []
    for _, result in load("long_tail_*.json", results):
        for row in result["rows"]:
            side = f"{row['placement']}, {row['max_staleness']}" if row["max_staleness"] else "synchronous, 0"
            sampler = "–" if row["sampler_idle"] is None else f"{row['sampler_idle']:.0%}"
            simulated = "–" if row["simulated_speedup"] is None else f"{row['simulated_speedup']:.2f}"
            others = "–" if row["others_cpus"] is None else f"{row['others_cpus']:.1f}"
            rows.append(
                f"| {result['device']} | {result['shape']} | {side} | {row['samples_per_s']:.1f}"
                f" | {spread(row['step_s'], 2)} | {row['trainer_idle']:.0%} | {sampler}"
                f" | {row['staleness_max']:.0f} | {row['speedup']:.2f} | {simulated} | {others} |"
            )
    return table(header, rows)


def stream_kill_drill(results: Path = RESULTS) -> str:
    """Return the table of the kill drills, a row for each point."""
    rows = []
    for _, result in load("stream_kill_drill.json", results):
        found: dict[str, dict[str, str]] = {}
        for line in result["drills"]:
            placement, _, point = line["point"].partition(": ")
            found.setdefault(point, {})[placement] = str(len(line["problems"]) or "none")
        rows += [f"| {point} | {p.get('separate', '–')} | {p.get('shared', '–')} |" for point, p in found.items()]
    return table("| killed at | problems, separate | problems, shared |", rows)


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
