"""Try every recipe: does it parse, does its plan fit, does it train two steps when it is shrunk?

`python scripts/recipe_table.py` tries those that benchmarks/results/recipes.json lacks, one after the other, and writes
the table of docs/recipes.md; `--table` writes the table alone; names such as ``qwen3-8b/grpo`` try these again.
"""

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from write_recipes import RECIPES, plan_of, recipe_files

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "recipes.json"
DOCUMENT = ROOT / "docs" / "recipes.md"
START, END = "<!-- recipes -->", "<!-- end of recipes -->"
_TIMEOUT_S = 420


def name_of(path: Path) -> str:
    """``qwen3-8b/grpo``."""
    return path.relative_to(RECIPES).with_suffix("").as_posix()


def try_recipe(path: Path, *, runs: bool = True) -> dict[str, Any]:
    """What becomes of a recipe; without `runs` nothing is trained."""
    run = plan_of(path)  # parses, or raises
    found: dict[str, Any] = {"parses": True, "plans": run.fits}
    return found | (shrink(path) if runs else {})


def shrink(path: Path) -> dict[str, Any]:
    """Train the shrunk recipe in a process of its own: ranks, seconds, and the gradient norm of each step."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "lightning_megatron_rl", "fit", "--config", str(path), "--shrink"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        started = time.monotonic()
        with (Path(directory) / "log").open("w+") as log:
            process = subprocess.Popen(
                command, cwd=directory, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                code = process.wait(_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                return {"shrinks": False, "error": f"not done after {_TIMEOUT_S} s"}
            seconds = time.monotonic() - started
            log.seek(0)
            text = log.read()
        if code:
            errors = [line.strip() for line in text.splitlines() if "Error" in line or "error:" in line]
            return {"shrinks": False, "error": (errors or [f"exit code {code}"])[-1][:300]}
        (metrics,) = Path(directory).rglob("metrics.csv")
        with metrics.open() as stream:
            norms = [float(row["policy/grad_norm"]) for row in csv.DictReader(stream) if row.get("policy/grad_norm")]
        (config,) = Path(directory).rglob("shrunk.yaml")
        ranks = next(int(line.split()[1]) for line in config.read_text().splitlines() if line.startswith("  devices:"))
    learns = len(norms) == 2 and all(norm > 0 for norm in norms)
    return {"shrinks": learns, "ranks": ranks, "seconds": round(seconds), "grad_norms": norms}


def table(results: dict[str, Any]) -> str:
    """The table of the document."""
    lines = ["| recipe | parses | plan fits | two steps when shrunk | ranks |", "|---|---|---|---|---|"]
    for path in recipe_files():
        name = name_of(path)
        found = results.get(name, {})
        marks = [
            "✓" if found.get(key) else "not run" if key not in found else "–" for key in ("parses", "plans", "shrinks")
        ]
        link = f"[{name}](../configs/recipes/{name}.yaml)"
        lines.append(f"| {link} | {' | '.join(marks)} | {found.get('ranks', '')} |")
    return "\n".join(lines) + "\n"


def write_table(results: dict[str, Any]) -> None:
    """Put the table into the document."""
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(f"{START}\n")
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{START}\n{table(results)}{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--no-runs", action="store_true", help="parse and plan alone")
    parser.add_argument("--table", action="store_true", help="write the table alone")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    if not options.table:
        files = {name_of(path): path for path in recipe_files()}
        for name in options.names or [name for name in files if "shrinks" not in results.get(name, {})]:
            found = try_recipe(files[name], runs=not options.no_runs)
            print(name, found, flush=True)
            results = (json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}) | {
                name: found
            }  # others write, too
            partial = RESULTS.with_suffix(".partial")
            partial.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
            partial.replace(RESULTS)
    write_table(results)


if __name__ == "__main__":
    main()
