"""B3: a whole GRPO step, its phases, and the physical floor: ``python benchmarks/grpo_step.py``.

256 samples of 128 + 512 tokens (on a CPU a tiny model and shorter ones): weights go to vLLM, it samples with EOS
ignored, then rewards, old log-probs, one update. TRL's GRPOTrainer does the same work in the same run where it is
chosen, and so does verl; whether they did is checked. With --syncs 10 the same run measures weight syncs (B1), too.
The floor counts arithmetic and bytes alone: docs/results.md has the formula.
"""

import argparse
from pathlib import Path
from typing import Any

import peers
from common import default_device, facts, result_path, write_json
from compare import add_at_once, measured, run_sides
from floor import Work, floor_seconds
from ours import add_arguments, passed_on
from weight_sync import add_asleep_argument, measure_asleep, write_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, default_device())
    peers.add_arguments(parser)
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds per side")
    add_at_once(parser)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sync-out", type=Path, help="with --syncs: where B1 goes")
    add_asleep_argument(parser)
    options = parser.parse_args()
    sync_path = result_path("weight_sync", options.device, options.sync_out)
    if options.peer != "none" and (options.auto or options.sleep_level):
        parser.error(f"--auto and --sleep-level are of this project's side alone: --peer none, not {options.peer}")
    names, variants = peers.chosen(options.peer), options.verl_variants.split(",")
    for sides in run_sides(passed_on(options), names, options.timeout, variants, options.at_once):
        write_step(sides, options)
        if options.syncs:
            write_report(syncs_of(sides), options.device, sync_path)
    if options.syncs and options.asleep and options.device == "cuda" and not options.sleep_level:
        sides["asleep"] = measure_asleep(passed_on(options), options.timeout)
        write_report(sides, options.device, sync_path)


def syncs_of(sides: dict[str, Any]) -> dict[str, Any]:
    """Return the sides of B1: a sampler that slept between steps was measured awake, and as it is woken."""
    ours = sides["ours"]
    if not ours["sleep_level"]:
        return sides
    awake = {**ours["sync"], "seconds": ours["sync"]["awake_seconds"], "sleep_seconds": None}
    return {**sides, "ours": {**ours, "sync": awake}, "asleep": ours}


def write_step(sides: dict[str, Any], options: argparse.Namespace) -> None:
    """Write, draw and print what a step of one or two sides took, and the floor."""
    ours = sides["ours"]
    peaks = ours["peaks"]
    # floors are for the hardware as it was measured: a data sheet's figures are out of anyone's reach; several devices
    # would share everything evenly, without a word between them
    rates = (options.devices * peaks[name] for name in ("measured_flops", "measured_bytes_per_s"))
    floor = floor_seconds(Work(**ours["floor_work"]), *rates)
    result = {
        **facts(options.device),
        "benchmark": "B3 GRPO step",
        **sides,
        "floor_s": floor,
        "times_floor": ours["step_s"]["median"] / floor["step"],
        **{f"speedup_over_{name}": None for name in peers.PEERS},
        **{
            f"speedup_over_{name}": side["step_s"]["median"] / ours["step_s"]["median"]
            for name, side in measured(sides).items()
        },
    }
    path = result_path("grpo_step", options.device, options.out)
    write_json(path, result)
    plot(result, path.with_suffix(".png"))
    print_table(result)


def print_table(result: dict[str, Any]) -> None:
    """Print each side's step and phases."""
    for found in (result["ours"], *measured(result).values()):
        print(f"{found['who']}, {found['shape']}: step {found['step_s']['median']:.3f} s")
        for name, value in found["phases"].items():
            share = value["median"] / found["step_s"]["median"]
            print(f"  {name:16s} {value['median']:8.3f} s  {share:6.1%}")
    print(f"floor {result['floor_s']['step']:.4f} s: {result['times_floor']:.2f} times it")
    for name in peers.PEERS:
        if result[f"speedup_over_{name}"]:
            print(f"{name} takes {result[f'speedup_over_{name}']:.2f} times as long")
        for line in (result.get(name) or {}).get("different_work", ()):
            print(f"{name}: NOT THE SAME WORK: {line}")
        if "failed" in (result.get(name) or {}):
            print(f"{name} failed: {result[name]['failed']}")


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the phases of each side and of the floor, one upon the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars = {"floor": {name: value for name, value in result["floor_s"].items() if name != "step"}}
    for side, found in {"ours": result["ours"], **measured(result)}.items():
        bars[side] = {name: value["median"] for name, value in found["phases"].items()}
    names = list(dict.fromkeys(name for phases in bars.values() for name in phases))
    figure, axes = plt.subplots(figsize=(7, 2.6))
    left = dict.fromkeys(bars, 0.0)
    for name in names:
        values = [phases.get(name, 0.0) for phases in bars.values()]
        axes.barh(list(bars), values, left=[left[bar] for bar in bars], label=name)
        left = {bar: left[bar] + value for bar, value in zip(bars, values, strict=True)}
    axes.set(xlabel="seconds", title=f"B3: one GRPO step, {result['ours']['shape']} on {result['device']}")
    axes.legend(fontsize=7, ncols=3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
