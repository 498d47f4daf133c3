"""Learning curves of this project's GRPO and of `reference_grpo.py`, from one warm start, over several seeds.

    python benchmarks/learning_curves.py --jobs 5        # run again: what is done is kept

Writes ``results/learning_curves.json`` and ``results/learning_curves.png`` once every run is there.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from arithmetic_runs import (
    VAL_EVERY,
    Job,
    add_run_arguments,
    default_device,
    first_reaching,
    own_job,
    reference_job,
    run_missing,
    warm_start,
    write_json,
)

SIDES = {"ours": "lightning_megatron_rl (Megatron + vLLM)", "reference": "reference_grpo.py (torch + Transformers)"}
THRESHOLD = 0.9  # accuracy whose samples are counted
SAMPLES_PER_ROLLOUT = 128 * 8


def jobs(out: Path, model: Path, seeds: Sequence[int], rollouts: int, device: str, sides: Sequence[str]) -> list[Job]:
    """Return a run per side and seed."""
    found = []
    for side, seed in itertools.product(sides, seeds):
        name = f"{side}_{seed}"
        make = own_job if side == "ours" else reference_job
        found.append(make(name, out, model, seed=seed, rollouts=rollouts, device=device))
    return found


def permutation_p(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the share of all ways to share the values out whose means differ at least as much: an exact test.

    Example:
        ``permutation_p([1, 2], [3, 4])`` is 1/3: of 6 ways, 2 differ by 2.
    """
    values = [*ours, *theirs]
    observed = abs(statistics.fmean(ours) - statistics.fmean(theirs))
    differences = []
    for chosen in itertools.combinations(range(len(values)), len(ours)):
        mine = [values[index] for index in chosen]
        others = [values[index] for index in range(len(values)) if index not in chosen]
        differences.append(abs(statistics.fmean(mine) - statistics.fmean(others)))
    # rounding must not make a way with the same values differ from the observed one
    return sum(difference >= observed - 1e-12 for difference in differences) / len(differences)


def compare(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return, for three numbers of each run, both sides' mean and spread and how likely such a difference is by chance.

    `mean_accuracy` is the mean over the whole curve, `final_accuracy` the mean over its last five points, and
    `samples_to_threshold` counts samples to the first point at the threshold; a run that never gets there counts as
    one that does a validation later than its end.
    """

    def samples(curve: list[list[float]]) -> int:
        reached = first_reaching(curve, THRESHOLD)
        return SAMPLES_PER_ROLLOUT * (int(curve[-1][0]) + VAL_EVERY if reached is None else reached)

    def mean(points: list[list[float]]) -> float:
        return statistics.fmean(value for _, value in points)

    curves = {side: [run["accuracy"] for run in runs[side]] for side in SIDES}
    numbers = {
        "mean_accuracy": {side: [mean(curve) for curve in curves[side]] for side in SIDES},
        "final_accuracy": {side: [mean(curve[-5:]) for curve in curves[side]] for side in SIDES},
        "samples_to_threshold": {side: [samples(curve) for curve in curves[side]] for side in SIDES},
    }
    found: dict[str, Any] = {}
    for name, values in numbers.items():
        found[name] = {
            side: {"mean": statistics.fmean(values[side]), "std": statistics.stdev(values[side]), "runs": values[side]}
            for side in SIDES
        }
        found[name]["p_value"] = permutation_p(values["ours"], values["reference"])
    return found


def plot(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw mean and range of both sides."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    for axis, name, title in ((axes[0], "accuracy", "accuracy on held-out problems (greedy)"),
                              (axes[1], "reward", "mean reward of training rollouts")):  # fmt: skip
        for side, colour in (("ours", "tab:blue"), ("reference", "tab:orange")):
            steps = [step for step, _ in runs[side][0][name]]
            columns = list(zip(*([value for _, value in run[name]] for run in runs[side]), strict=True))
            axis.plot(steps, [statistics.fmean(column) for column in columns], color=colour, label=SIDES[side])
            axis.fill_between(steps, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.2, lw=0)
        axis.set(title=title, xlabel="rollouts of 1024 samples", ylim=(0.2, 1.0))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].axhline(THRESHOLD, color="grey", lw=0.8, ls="--")
    axes[0].legend(loc="lower right", frameon=False, title=f"mean and range of {len(runs['ours'])} seeds")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def merge(out: Path, seeds: Sequence[int], results: Path) -> None:
    """Write figures and plot of the runs that are there."""
    places = {side: [out / f"{side}_{seed}" for seed in seeds] for side in SIDES}
    runs = {side: [json.loads((at / "curves.json").read_text()) for at in found] for side, found in places.items()}
    start = runs["reference"][0]["accuracy"][0]
    for run in runs["ours"]:
        run["accuracy"].insert(0, start)  # the same weights and greedy: the reference has looked at them
    environment = json.loads((out / "environment.json").read_text())
    mismatch = [value for run in runs["ours"] for _, value in run["abs_logp_diff"]]
    figures = {
        "command": "python benchmarks/learning_curves.py",
        "environment": environment,
        "precision": "fp32, torch without TF32; vLLM's Triton attention on CUDA multiplies as Triton does by default",
        "seeds": list(seeds),
        "threshold": THRESHOLD,
        "comparison": compare(runs),
        "mean_abs_logp_diff": statistics.fmean(mismatch),
        "seconds": {side: [run["seconds"] for run in runs[side]] for side in SIDES},
        "curves": {
            side: [{name: run[name] for name in ("accuracy", "reward")} for run in runs[side]] for side in SIDES
        },
    }
    write_json(results / "learning_curves.json", figures)
    plot(runs, results / "learning_curves.png")
    print(json.dumps(figures["comparison"], indent=2))


def main() -> None:
    """Run what is missing, then merge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rollouts", type=int, default=150)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    options = parser.parse_args()
    out, device = options.out.resolve(), default_device()
    model = warm_start(out, device, steps=options.sft_steps)
    todo = jobs(out, model, options.seeds, options.rollouts, device, options.sides)
    run_missing(todo, out / "environment.json", device, options)
    if all((out / f"{side}_{seed}" / "curves.json").exists() for side in SIDES for seed in options.seeds):
        merge(out, options.seeds, options.results)


if __name__ == "__main__":
    main()
