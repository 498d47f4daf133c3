"""Kills runs that stream, resumes them, and counts their prompts: ``python -m tests.drills.kill_streams``.

A stream depends on times, so a resumed run is not the undisturbed one bit by bit. What is checked: in the steps that
count in the end every prompt of an epoch is used exactly once, nothing is older than the bound, a step that is done
again gets the same prompts from the data, and nothing is left. One drill kills a run several times, each time at
another point, and resumes it from its last checkpoint.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.drills.facts import facts
from tests.drills.faults import Point
from tests.drills.job import Job, history
from tests.drills.kill import (
    ATTEMPT_TIMEOUT,
    Attempt,
    adopt_orphans,
    attempt,
    broken_checkpoints,
    fork,
    make_model,
    unfinished,
)
from tests.drills.stream_points import DRILLS, PLACEMENTS, SHORT

BATCHES, EPOCHS, MAX_STALENESS = 12, 2, 2
ROWS = 4 * BATCHES + 2  # the last two make no batch
STEPS = BATCHES * EPOCHS


def drill(faults: tuple[Point, ...], placement: str, model: Path, directory: Path) -> list[dict[str, Any]]:
    """Kill at each point, resume each time, and count; returns a line of the report for each point."""
    directory.mkdir()
    lines: list[dict[str, Any]] = []
    for number, fault in enumerate([*faults, None]):
        job = Job(
            model,
            directory,
            fault=fault,
            resumes=number > 0,
            vllm=True,
            streaming={"max_staleness": MAX_STALENESS, "placement": placement},
            rows=ROWS,
            trainer={"max_steps": STEPS},
        )
        started = time.monotonic()
        ended = attempt(job, 2 * ATTEMPT_TIMEOUT, world_size=1)
        problems = [f"left behind: {thing}" for thing in ended.left] + broken_checkpoints(directory)
        problems += unexpected(fault, ended)
        if fault is not None:
            seconds = round(time.monotonic() - started, 1)
            line = {"point": f"{placement}: {fault.name}", "exit_codes": ended.codes, "seconds": seconds}
            lines.append({**line, "steps": len(steps_seen(directory)), "problems": problems})
        else:
            lines[-1]["problems"] += problems
    if not any(line["problems"] for line in lines):
        found = unfinished(directory) + count_prompts(directory, BATCHES, EPOCHS, MAX_STALENESS)
        for line in lines:
            line["problems"] += found
    return lines


def unexpected(fault: Point | None, ended: Attempt) -> list[str]:
    """Return what is wrong with how an attempt ended."""
    wanted = [0] if fault is None else [-signal.SIGKILL]
    where = "the resumed run" if fault is None else f"the run that was to be killed at {fault.name!r}"
    return [] if ended.codes == wanted else [f"{where} ended with {ended.codes}: {ended.output}"]


def steps_seen(directory: Path) -> list[int]:
    """Return the steps that all attempts have begun."""
    path = directory / "seen-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line["step"] for line in lines if "rows" in line]


def count_prompts(directory: Path, batches: int, epochs: int, max_staleness: int) -> list[str]:
    """Return which prompts were lost or used twice in the steps that count in the end, and which were too old."""
    (seen,) = history(directory, 1)
    problems = []
    if sorted(seen["used"]) != list(range(batches * epochs)):
        problems.append(f"trained steps are {sorted(seen['used'])}, there should be {batches * epochs}")
    brought: dict[int, list[int]] = {}
    for line in map(json.loads, (directory / "seen-0.jsonl").read_text().splitlines()):
        if "rows" in line and brought.setdefault(line["step"], line["rows"]) != line["rows"]:
            problems.append(f"step {line['step']} was done again with other prompts")
    for epoch in range(epochs):
        steps = range(epoch * batches, (epoch + 1) * batches)
        rows = [row for step in steps for row in brought.get(step, [])]
        used = [row for step in steps for row in seen["used"].get(step, [])]
        if len(set(rows)) != 4 * batches:
            problems.append(f"epoch {epoch}: the data has brought {len(set(rows))} prompts of {4 * batches}")
        if lost := sorted(set(rows) - set(used)):
            problems.append(f"epoch {epoch}: rows {lost} were lost")
        if again := sorted({row for row in used if used.count(row) > 1}):
            problems.append(f"epoch {epoch}: rows {again} were used again")
        if foreign := sorted(set(used) - set(rows)):
            problems.append(f"epoch {epoch}: rows {foreign} were used, which the data has not brought")
    oldest = max(seen["age"].values(), default=0)
    if oldest > max_staleness:
        problems.append(f"responses were {oldest} versions old at a bound of {max_staleness}")
    return problems


def read_report(path: Path) -> list[dict[str, Any]]:
    """Return what an earlier run has found."""
    lines: list[dict[str, Any]] = json.loads(path.read_text())["drills"] if path.exists() else []
    return lines


def write_report(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write what was found, and of what."""
    told = {"steps": STEPS, "max_staleness": MAX_STALENESS, "kills": len(lines), "drills": lines}
    path.write_text(json.dumps({**facts("kill_streams"), **told}, indent=2) + "\n")


def main() -> int:
    """Run the drills and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few points only")
    parser.add_argument("--placements", nargs="*", choices=PLACEMENTS, default=PLACEMENTS)
    parser.add_argument("--out", type=Path, help="where the report goes, JSON")
    parser.add_argument("--resume", action="store_true", help="keep the drills that the report has, do the others")
    options = parser.parse_args()
    if options.resume and options.out is None:
        parser.error("--resume without --out: there is no report to go on from")
    adopt_orphans()
    lines = read_report(options.out) if options.resume else []
    done = {line["point"] for line in lines}
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "model"
        # in a fork: it starts threads, and a process with threads is not to be forked
        if os.waitpid(fork(partial(make_model, model), Path(root) / "model.log"), 0)[1]:
            raise RuntimeError((Path(root) / "model.log").read_text())
        drills = [(placement, faults) for faults in DRILLS for placement in options.placements]
        if options.short:
            drills = [(placement, faults) for placement in options.placements for faults in SHORT[placement]]
        for number, (placement, faults) in enumerate(drills):
            if f"{placement}: {faults[0].name}" in done:
                continue
            found = drill(faults, placement, model, Path(root) / str(number))
            print("\n".join(map(json.dumps, found)), flush=True)
            lines += found
            if options.out is not None:  # a long run that is ended has told what it found
                write_report(options.out, lines)
    return int(any(line["problems"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
