"""How long the command line takes to say what it can do: ``python benchmarks/cli_help.py``.

Wall-clock and CPU time of each command in a process of its own, median of five after one that warms the file cache. The
target is 3 s for ``--help``; CPU time is what other load on the machine does not change.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (["--help"], ["fit", "--help"])
PACKAGES = ("torch", "lightning", "jsonargparse")
TARGET_S = {"--help": 3.0}


def measure(arguments: list[str]) -> tuple[float, float]:
    """Run one command; return its wall-clock and CPU time. # seconds"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    command = [sys.executable, "-m", "lightning_megatron_rl", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cli_help.json")
    options = parser.parse_args()
    results = {}
    print(f"{'command':12s} {'wall':>8s} {'cpu':>8s}   median of {options.repeats}, seconds")
    for arguments in COMMANDS:
        measure(arguments)
        times = [measure(arguments) for _ in range(options.repeats)]
        wall, cpu = (round(statistics.median(values), 3) for values in zip(*times, strict=True))
        name = " ".join(arguments)
        results[name] = {"wall_s": wall, "cpu_s": cpu, "target_s": TARGET_S.get(name)}
        print(f"{name:12s} {wall:8.2f} {cpu:8.2f}")
    facts = {
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
        "versions": {package: version(package) for package in PACKAGES},
        "repeats": options.repeats,
        "results": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
