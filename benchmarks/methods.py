"""Every preset of configs/algorithms/, and PPO, from one warm start until 0.85 of the held-out sums are right.

    python benchmarks/methods.py --jobs 4                # run again: what is done is kept
    python scripts/methods_table.py                      # then: the table of docs/algorithms.md

Writes ``results/methods.json`` once every run is there.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from arithmetic_runs import (
    CONFIGS,
    Job,
    add_run_arguments,
    default_device,
    first_reaching,
    own_job,
    run_missing,
    warm_start,
    write_json,
)

THRESHOLD = 0.85  # greedy accuracy on 500 held-out problems
MAX_ROLLOUTS = 150  # within which every method has to get there
PROMPTS, GENERATIONS = 128, 8  # per rollout, per prompt
PRESETS = sorted(path.stem for path in (CONFIGS / "algorithms").glob("*.yaml"))
METHODS = [*PRESETS, "ppo"]


def jobs(out: Path, model: Path, methods: Sequence[str], rollouts: int, device: str, seed: int) -> list[Job]:
    """Return a run per method."""
    found = []
    for method in methods:
        base = CONFIGS / "demo" / ("ppo.yaml" if method == "ppo" else "grpo.yaml")
        overlays = [] if method == "ppo" else [CONFIGS / "algorithms" / f"{method}.yaml"]
        found.append(
            own_job(
                f"method_{method}",
                out,
                model,
                base=base,
                overlays=overlays,
                seed=seed,
                rollouts=rollouts,
                device=device,
                stop_at=THRESHOLD,
            )
        )
    return found


def summarise(run: dict[str, Any]) -> dict[str, Any]:
    """Return what the table shows of a run; `rollouts` is None if it never got to the threshold."""
    reached = first_reaching(run["accuracy"], THRESHOLD)
    last = reached or int(run["accuracy"][-1][0])
    refills = sum(groups for step, groups in run["refill_groups"] if step <= last)
    return {
        "rollouts": reached,
        "samples": int(last * PROMPTS * GENERATIONS + refills * GENERATIONS),
        "accuracy": {int(step): value for step, value in run["accuracy"]}[last],
        "best_accuracy": max(value for _, value in run["accuracy"]),
        "worst_abs_logp_diff": max(value for _, value in run["abs_logp_diff"]),
        "curve": run["accuracy"],
        "seconds": run["seconds"],
    }


def main() -> None:
    """Run what is missing, then merge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--rollouts", type=int, default=MAX_ROLLOUTS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    out, device = options.out.resolve(), default_device()
    model = warm_start(out, device, steps=options.sft_steps)
    todo = jobs(out, model, options.methods, options.rollouts, device, options.seed)
    run_missing(todo, out / "environment_methods.json", device, options)
    figures = {
        "command": "python benchmarks/methods.py",
        "environment": json.loads((out / "environment_methods.json").read_text()),
        "threshold": THRESHOLD,
        "max_rollouts": options.rollouts,
        "samples_per_rollout": PROMPTS * GENERATIONS,
        "seed": options.seed,
        "methods": {job.name.removeprefix("method_"): summarise(json.loads(job.result.read_text())) for job in todo},
    }
    write_json(options.results / "methods.json", figures)
    for method, row in figures["methods"].items():
        print(f"{method:24}{row['rollouts']!s:>6} rollouts  accuracy {row['accuracy']:.3f}", flush=True)


if __name__ == "__main__":
    main()
