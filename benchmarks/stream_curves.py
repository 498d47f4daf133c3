"""Learning curves of streams beside the synchronous run's, from one warm start, over several seeds.

    python benchmarks/stream_curves.py --jobs 16         # run again: what is done is kept
    python benchmarks/stream_curves.py --reference       # a synchronous GRPO of its own whose sampler is so far behind

Streams sample so far ahead that every batch is as old as its bound allows. Writes ``results/stream_curves.json`` and
``results/stream_curves.png`` once every run is there. With ``--reference`` runs are those of ``reference_grpo.py``
(plain torch and Transformers, no stream), whose batches are drawn with the weights of so many rollouts ago: what that
alone costs. They go to ``results/stream_curves_reference.json``; results of other rollouts or of another learning rate
have these in their names.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from arithmetic_runs import (
    LEARNING_RATE,
    Job,
    add_run_arguments,
    default_device,
    own_job,
    reference_job,
    run_missing,
    warm_start,
    write_json,
    write_overlay,
)
from learning_curves import permutation_p

PROMPTS, GENERATIONS = 128, 8  # per rollout, per prompt
LAST = 5  # points of a curve whose mean is its end


@dataclass(frozen=True)
class Variant:
    """One way to sample.

    Args:
        staleness: The bound; 0 is the synchronous run.
        placement: "shared" or "separate".
        correction: Of the loss; None: tokens that an older policy drew are taken as they are.
    """

    staleness: int = 0
    placement: str = "shared"
    correction: str | None = "tis"

    @property
    def name(self) -> str:
        """What a table calls it."""
        if not self.staleness:
            return "synchronous"
        return f"{self.placement}, {self.staleness}" + ("" if self.correction else ", no correction")

    @property
    def directory(self) -> str:
        """Where its runs are."""
        return self.name.replace(", ", "_").replace(" ", "_")

    def changes(self) -> dict[str, Any]:
        """Return its part of a config: room for all groups that the bound lets be begun."""
        ahead = (self.staleness + 1) * PROMPTS
        engine = {"max_num_seqs": ahead * GENERATIONS, "kv_cache_memory_gb": 1.0}
        arguments: dict[str, Any] = {"engine": {"class_path": "VLLMEngine", "init_args": engine}}
        if self.staleness:
            streaming = {"max_staleness": self.staleness, "in_flight": ahead, "placement": self.placement}
            arguments |= {"streaming": streaming, "loss": {"correction": self.correction}}
        return {"model": {"init_args": arguments}}


SYNCHRONOUS = Variant()
VARIANTS = (
    SYNCHRONOUS,
    *(Variant(bound, placement) for placement in ("shared", "separate") for bound in (1, 2, 4)),
    Variant(8),
    Variant(8, correction=None),
)
ROLLOUTS = 75  # of a run
SEEDS = [0, 1, 2, 3, 4]
DELAYS = (0, 2, 4)  # rollouts by which the reference's sampler is behind


def jobs(
    out: Path, model: Path, variants: Sequence[Variant], seeds: Sequence[int], rollouts: int, device: str, lr: float
) -> list[Job]:
    """Return a run per variant and seed."""
    found = []
    for variant in variants:
        overlay = write_overlay(out / f"{variant.directory}.yaml", variant.changes())
        for seed in seeds:
            found.append(
                own_job(
                    f"{variant.directory}_{seed}",
                    out,
                    model,
                    seed=seed,
                    rollouts=rollouts,
                    device=device,
                    last=[overlay],
                    lr=lr,
                )
            )
    return found


def reference_jobs(
    out: Path, model: Path, delays: Sequence[int], seeds: Sequence[int], rollouts: int, device: str, lr: float
) -> dict[int, list[Job]]:
    """Return runs of the reference, one per seed, by how far its sampler is behind."""
    run: dict[str, Any] = {"out": out, "model": model, "rollouts": rollouts, "device": device, "lr": lr}
    return {
        delay: [reference_job(f"reference_{delay}_{seed}", seed=seed, staleness=delay, **run) for seed in seeds]
        for delay in delays
    }


def compare(curves: dict[str, list[list[list[float]]]], baseline: str = SYNCHRONOUS.name) -> dict[str, dict[str, Any]]:
    """Return mean and standard deviation of each variant's curves and of their ends, and how likely by chance they
    differ as much from the baseline's.

    Args:
        curves: By the variant's name, of each seed: pairs of rollouts and accuracy.
        baseline: Name of the synchronous run.
    """
    found: dict[str, dict[str, Any]] = {}
    numbers: dict[str, dict[str, list[float]]] = {}
    for name, runs in curves.items():
        numbers[name] = {
            "mean_accuracy": [statistics.fmean(value for _, value in curve) for curve in runs],
            "final_accuracy": [statistics.fmean(value for _, value in curve[-LAST:]) for curve in runs],
        }
        found[name] = {}
        for what, values in numbers[name].items():
            found[name][what] = {
                "mean": statistics.fmean(values),
                "std": statistics.stdev(values) if len(values) > 1 else 0.0,
                "p_value": permutation_p(values, numbers[baseline][what]),
            }
    return found


def plot(curves: dict[str, list[list[list[float]]]], path: Path) -> None:
    """Draw the mean of each variant, and the range of the synchronous run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.4))
    for name, runs in curves.items():
        steps = [step for step, _ in runs[0]]
        columns = list(zip(*([value for _, value in curve] for curve in runs), strict=True))
        means = [statistics.fmean(column) for column in columns]
        if name == SYNCHRONOUS.name:
            axes.fill_between(steps, list(map(min, columns)), list(map(max, columns)), color="grey", alpha=0.3, lw=0)
        style = {"color": "black", "lw": 2.0} if name == SYNCHRONOUS.name else {"lw": 1.2}
        axes.plot(steps, means, "--" if "separate" in name else "-", label=name, **style)
    title = f"accuracy on held-out problems (greedy), mean of {len(next(iter(curves.values())))} seeds"
    axes.set(title=title, xlabel=f"rollouts of {PROMPTS * GENERATIONS} samples")
    axes.legend(loc="lower right", frameon=False, fontsize=7)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def merge(variants: Sequence[Variant], options: argparse.Namespace) -> None:
    """Write figures and plot of the runs that are there."""
    places = {
        variant.name: [options.out / f"{variant.directory}_{seed}" for seed in options.seeds] for variant in variants
    }
    runs = {name: [json.loads((at / "curves.json").read_text()) for at in found] for name, found in places.items()}
    curves = {name: [run["accuracy"] for run in found] for name, found in runs.items()}
    ahead = {name: found for name, found in runs.items() if name != SYNCHRONOUS.name}
    more = [] if tuple(variants) == VARIANTS else ["--variants", *(variant.name for variant in variants)]
    figures = {
        **figures_of("stream_curves", curves, SYNCHRONOUS.name, options, more),
        "staleness_mean": {
            name: statistics.fmean(value for run in found for _, value in run["staleness_mean"])
            for name, found in ahead.items()
        },
        "staleness_max": {
            name: max(value for run in found for _, value in run["staleness_max"]) for name, found in ahead.items()
        },
    }
    path = result_file("stream_curves", options)
    write_json(path, figures)
    plot(curves, path.with_suffix(".png"))


def merge_reference(found: dict[int, list[Job]], options: argparse.Namespace) -> None:
    """Write the figures of the reference's runs that are there."""
    runs = {str(delay): [json.loads(job.result.read_text()) for job in jobs] for delay, jobs in found.items()}
    curves = {delay: [run["accuracy"][1:] for run in of_delay] for delay, of_delay in runs.items()}  # 0: the same start
    more = ["--reference"]
    if tuple(options.delays) != DELAYS:
        more += ["--delays", *map(str, options.delays)]
    write_json(
        result_file("stream_curves_reference", options),
        figures_of("stream_curves_reference", curves, "0", options, more),
    )


def figures_of(
    name: str,
    curves: dict[str, list[list[list[float]]]],
    baseline: str,
    options: argparse.Namespace,
    more: Sequence[str],
) -> dict[str, Any]:
    """Return what a result says of curves, and print their ends; `more` are options that are not as without any."""
    usual = {"rollouts": ROLLOUTS, "lr": LEARNING_RATE, "seeds": SEEDS}
    own = [(key, getattr(options, key)) for key, value in usual.items() if getattr(options, key) != value]
    given = [word for key, value in own for word in (f"--{key}", *map(str, value if key == "seeds" else [value]))]
    comparison = compare(curves, baseline)
    print_ends(comparison)
    return {
        "command": shlex.join(["python", "benchmarks/stream_curves.py", *more, *given]),
        "environment": json.loads((options.out / f"environment_{name}.json").read_text()),
        "seeds": list(options.seeds),
        "rollouts": options.rollouts,
        "lr": options.lr,
        "samples_per_rollout": PROMPTS * GENERATIONS,
        "comparison": comparison,
        "curves": curves,
    }


def result_file(name: str, options: argparse.Namespace) -> Path:
    """Return where figures go."""
    name += "" if options.rollouts == ROLLOUTS else f"_{options.rollouts}"
    name += "" if options.lr == LEARNING_RATE else f"_lr_{options.lr:g}"
    return Path(options.results) / f"{name}.json"


def print_ends(comparison: dict[str, dict[str, Any]]) -> None:
    """Print a line per variant."""
    for name, found in comparison.items():
        mean, end = found["mean_accuracy"], found["final_accuracy"]
        print(f"{name:26} {mean['mean']:.3f} ± {mean['std']:.3f}, p {mean['p_value']:.3f};", end=" ")
        print(f"in the end {end['mean']:.3f} ± {end['std']:.3f}, p {end['p_value']:.3f}", flush=True)


def main() -> None:
    """Run what is missing, then merge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    parser.add_argument("--lr", type=float, default=LEARNING_RATE, help="learning rate at its highest")
    names = {variant.name: variant for variant in VARIANTS}
    parser.add_argument("--variants", nargs="+", choices=list(names), default=list(names))
    parser.add_argument("--reference", action="store_true", help="reference_grpo.py, behind by --delays")
    parser.add_argument("--delays", type=int, nargs="+", default=list(DELAYS), help="rollouts; 0 must be among them")
    options = parser.parse_args()
    if 0 not in options.delays:
        parser.error(f"--delays {options.delays} without 0, with which the others are compared")
    device = default_device()
    variants = [names[name] for name in options.variants]
    model = warm_start(options.out.resolve(), device, steps=options.sft_steps)
    out = options.out = options.out.resolve() / f"rollouts_{options.rollouts}_lr_{options.lr:g}"
    runs = options.seeds, options.rollouts, device, options.lr
    if options.reference:
        found = reference_jobs(out, model, options.delays, *runs)
        environment = out / "environment_stream_curves_reference.json"
        run_missing([job for jobs in found.values() for job in jobs], environment, device, options)
        merge_reference(found, options)
        return
    run_missing(jobs(out, model, variants, *runs), out / "environment_stream_curves.json", device, options)
    merge(variants, options)


if __name__ == "__main__":
    main()
