"""Tables of results.md, kill_drills.md, resharding.md and exports.md in docs/: saves, drills, resharding, `convert`."""

from pathlib import Path

from results import RESULTS, load, spread, table


def checkpoint(results: Path = RESULTS) -> str:
    """Return the table of B5."""
    header = (
        "| device | load before | model | size, GB | waited for, s | blocked, s | share"
        " | first blocked, s | steps longer, s | waited for, GB/s | beside, GB/s | verify, s | load, s |"
    )
    rows = []
    for _, result in load("checkpoint_*.json", results):
        sync, beside = result["sync"], result["async"]
        where = f"{result['device']}, {result['cpu_cores']} cores | {result['load_before']:.1f}"
        rows.append(
            f"| {where} | {beside['shape']}, {beside['precision']} | {beside['bytes'] / 1e9:.2f}"
            f" | {spread(sync['blocked_s'], 2)} | {spread(beside['blocked_s'], 2)} | {result['blocked_share']:.1%}"
            f" | {beside['first_blocked_s']:.2f} | {beside['slowed_s_per_save']:.2f}"
            f" | {result['sync_gb_per_s']:.2f} | {result['async_gb_per_s']:.2f}"
            f" | {spread(beside['verify_s'], 2)} | {spread(beside['load_s'], 2)} |"
        )
    return table(header, rows)


def kill_drill(results: Path = RESULTS) -> str:
    """Return the table of the kill drills."""
    header = "| killed at | ranks | steps done again | others ended after, s | differences |"
    rows = []
    for _, result in load("kill_drill*.json", results):
        for drill in result["drills"]:
            ranks = "both" if len(drill["ranks"]) == result["ranks"] else ", ".join(map(str, drill["ranks"]))
            waited = "–" if ranks == "both" else f"{drill['others_ended_after_s']:.1f}"
            found = len(drill["problems"]) or "none"
            rows.append(f"| {drill['point']} | {ranks} | {drill['steps_done_again']} | {waited} | {found} |")
    return table(header, rows)


def resharding(results: Path = RESULTS) -> str:
    """Return the table of the resharding matrix."""
    header = "| tiny model of | layouts | pairs | largest difference | what the run moved a weight by | not equal |"
    rows = []
    for _, result in load("resharding.json", results):
        for row in result["families"]:
            rows.append(
                f"| {row['family']} | {', '.join(row['layouts'])} | {len(row['layouts']) ** 2} | {row['worst']:.1e}"
                f" | {row['largest_step']:.1e} | {len(row['problems']) or 'none'} |"
            )
    return table(header, rows)


def conversion(results: Path = RESULTS) -> str:
    """Return the table of `convert`."""
    header = (
        "| device | model, bf16 | GB | largest tensor, GB | to a checkpoint: s, CPU s, peak GB |"
        " to Hugging Face: s, CPU s, peak GB |"
    )
    rows = []
    for _, result in load("convert_*.json", results):
        for row in result["rows"]:
            ways = [
                f"{row[way]['seconds']:.0f}, {row[way]['cpu_seconds']:.0f}, {row[way]['peak_gb']:.2f}"
                for way in ("to_checkpoint", "to_hf")
            ]
            name, _, layers = row["shape"].partition(":")
            model = f"{name}, {layers} layers" if layers else name
            rows.append(
                f"| {result['device']}, {result['cpu_cores']} cores | {model} | {row['gb']:.2f}"
                f" | {row['largest_tensor_gb']:.3f} | {ways[0]} | {ways[1]} |"
            )
    return table(header, rows)
