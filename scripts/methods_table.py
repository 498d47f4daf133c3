"""Write the tables of how fast methods learn into docs/algorithms.md: `python scripts/methods_table.py`.

The figures are those of benchmarks/results/methods.json and benchmarks/results/learning_curves.json.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "algorithms.md"
RESULTS = ROOT / "benchmarks" / "results"


def methods_table(figures: dict[str, Any]) -> str:
    """The rows, in the order in which methods get there, below a line that says what was run; then what was not run."""
    machine, torch = (figures["environment"][name] for name in ("machine", "torch"))
    threshold, per_rollout, limit = (figures[name] for name in ("threshold", "samples_per_rollout", "max_rollouts"))
    lines = [
        f"Measured by `python benchmarks/methods.py` on {machine} with torch {torch}, fp32, one run per method, seed"
        f" {figures['seed']};\n{per_rollout} samples per rollout, at most {limit} rollouts, a look at the 500 held-out"
        " problems every 5.\n\n",
        f"| method | rollouts to ≥ {threshold} | samples | accuracy there | mean \\|log π_old − log π_roll\\|, worst"
        " rollout |\n",
        "|---|---|---|---|---|\n",
    ]
    rows = figures["methods"].items()
    for method, row in sorted(rows, key=lambda item: (item[1]["rollouts"] is None, item[1]["samples"], item[0])):
        overlay = "../configs/demo/ppo.yaml" if method == "ppo" else f"../configs/algorithms/{method}.yaml"
        reached = "not reached" if row["rollouts"] is None else row["rollouts"]
        lines.append(
            f"| [`{method}`]({overlay}) | {reached} | {row['samples']:,} | {row['accuracy']:.3f} |"
            f" {row['worst_abs_logp_diff']:.1e} |\n"
        )
    for method in sorted(path.stem for path in (ROOT / "configs" / "algorithms").glob("*.yaml")):
        if method not in figures["methods"]:
            lines.append(f"| [`{method}`](../configs/algorithms/{method}.yaml) | not measured | – | – | – |\n")
    return "".join(lines)


def curves_table(figures: dict[str, Any]) -> str:
    """Mean and spread of both sides, below a line that says what was run."""
    machine, torch = (figures["environment"][name] for name in ("machine", "torch"))
    comparison, per_side = figures["comparison"], len(figures["seeds"])
    names = {
        "mean_accuracy": ("accuracy, mean over the whole curve", ".4f"),
        "final_accuracy": ("accuracy, mean of the last five looks", ".4f"),
        "samples_to_threshold": (f"samples to {figures['threshold']} accuracy", ",.0f"),
    }
    lines = [
        f"Measured by `python benchmarks/learning_curves.py` on {machine} with torch {torch}, fp32, {per_side} seeds a"
        " side, mean ± standard deviation;\np is the share of all ways to deal the runs out to two sides that differ at"
        " least as much.\n\n",
        "| | `GRPOModule` | `reference_grpo.py` | p |\n",
        "|---|---|---|---|\n",
    ]
    for name, (title, digits) in names.items():
        row = comparison[name]
        ours, reference = (
            f"{row[side]['mean']:{digits}} ± {row[side]['std']:{digits}}" for side in ("ours", "reference")
        )
        lines.append(f"| {title} | {ours} | {reference} | {row['p_value']:.2f} |\n")
    return "".join(lines)


TABLES = {"methods": (methods_table, "methods.json"), "curves": (curves_table, "learning_curves.json")}


def with_tables(text: str) -> str:
    """The document with the current tables between their marks."""
    for name, (table, file) in TABLES.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = before + start + table(json.loads((RESULTS / file).read_text())) + end + after
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
