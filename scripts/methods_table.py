"""Write the table of how fast each method learns into docs/algorithms.md: `python scripts/methods_table.py`.

The figures are those of benchmarks/results/methods.json.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "algorithms.md"
FIGURES = ROOT / "benchmarks" / "results" / "methods.json"
START, END = "<!-- methods -->\n", "<!-- end of methods -->\n"


def table(figures: dict[str, Any]) -> str:
    """The rows, in the order in which methods get there, below a line that says what was run."""
    machine, torch = (figures["environment"][name] for name in ("machine", "torch"))
    threshold, per_rollout, limit = (figures[name] for name in ("threshold", "samples_per_rollout", "max_rollouts"))
    lines = [
        f"Measured by `python benchmarks/methods.py` on {machine} with torch {torch}, fp32, one run per method, seed"
        f" {figures['seed']};\n{per_rollout} samples per rollout, at most {limit} rollouts, a look at the 500 held-out"
        " problems every 5.\n\n",
        f"| method | rollouts to ≥ {threshold} | samples | accuracy there | worst \\|log π_old − log π_roll\\| |\n",
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
    return "".join(lines)


def with_table(text: str) -> str:
    """The document with the current table between its marks."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return before + START + table(json.loads(FIGURES.read_text())) + END + after


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
