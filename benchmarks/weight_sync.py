"""B1: seconds until the sampler has the trainer's weights: ``python benchmarks/weight_sync.py``.

From the trainer's layout to vLLM's, export included, until the new weights sample (prefix cache reset). The limit is
the bytes of the weights read once and written once for each sampler, at the bandwidth that a copy on this device was
measured at (of several devices, at the sum of theirs), or what one worker reads out of other GPUs' memory, at the rate
of a copy from one GPU to another, if that takes longer. One step of training follows, whose log-prob mismatch shows
that the weights arrived. TRL's own sync runs in the same run with ``--peer trl``.
"""

import argparse
from pathlib import Path
from typing import Any

import peers
from common import default_device, facts, result_path, run_child, write_json
from compare import run_sides
from ours import add_arguments, passed_on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, default_device())
    parser.set_defaults(syncs=10, steps=1, warmup=0, prompts=4, response_tokens=32)
    parser.add_argument("--peer", choices=("trl", "none"), default="none", help="that runs, too; `make peers` first")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per side")
    parser.add_argument("--out", type=Path)
    add_asleep_argument(parser)
    options = parser.parse_args()
    path = result_path("weight_sync", options.device, options.out)
    for sides in run_sides(passed_on(options), peers.chosen(options.peer), options.timeout):
        write_report(sides, options.device, path)
    if options.asleep and options.device == "cuda":
        sides["asleep"] = measure_asleep(passed_on(options), options.timeout)
        write_report(sides, options.device, path)


def add_asleep_argument(parser: argparse.ArgumentParser) -> None:
    """Let a run leave out the sampler that slept: it takes one more start."""
    parser.add_argument("--asleep", action=argparse.BooleanOptionalAction, help="a sampler that slept, too; on CUDA")
    parser.set_defaults(asleep=default_device() == "cuda")


def measure_asleep(arguments: list[str], timeout_s: float) -> dict[str, Any]:
    """Measure syncs to an engine that slept at level 2: its memory comes back, weights go, its cache comes back."""
    short = ["--sleep-level=2", "--steps=1", "--warmup=0", "--prompts=4", "--response-tokens=32"]
    return run_child("ours.py", [*arguments, *short], timeout_s)


def write_report(sides: dict[str, Any], device: str, path: Path) -> None:
    """Write and print what the syncs of two sides took; grpo_step.py calls it, too, to save a start of each."""
    bandwidth = sides["ours"]["devices_per_sampler"] * sides["ours"]["peaks"]["measured_bytes_per_s"]
    runs = {name: side for name, side in sides.items() if "failed" not in side}
    links = sides["ours"]["peaks"]["measured_peer_bytes_per_s"]
    rates = {name: rate(side["sync"], bandwidth, links) for name, side in runs.items() if side["sync"]}
    result = {
        **facts(device),
        "benchmark": "B1 weight sync",
        **sides,
        "rates": rates,
        "speedup_over_trl": rates["trl"]["seconds"] / rates["ours"]["seconds"] if "trl" in rates else None,
    }
    write_json(path, result)
    plot(result, path.with_suffix(".png"))
    for name, found in rates.items():
        print(
            f"{name:5s} {found['seconds'] * 1e3:9.2f} ms  {found['gb_per_s']:8.2f} GB/s  {found['share_of_limit']:7.2%}"
            f" of the limit ({found['limit_seconds'] * 1e3:.2f} ms)  extra {found['extra_gib']:.2f} GiB"
        )
    print(f"mismatch after the sync: {sides['ours']['mismatch'][0]:.5f}")


def rate(sync: dict[str, Any], bytes_per_s: float, peer_bytes_per_s: float | None) -> dict[str, Any]:
    """Return a sync's rate against the time that reading and writing its bytes takes, or reading them from other GPUs.

    Example:
        1 GB in 0.1 s at 2 TB/s: 10 GB/s, a limit of 1 ms, 1 % of it.
    """
    seconds, by_memory = sync["seconds"]["median"], 2 * sync["bytes"] / bytes_per_s
    by_links = sync.get("peer_bytes", 0) / peer_bytes_per_s if peer_bytes_per_s else 0.0
    limit = max(by_memory, by_links)
    return {
        "seconds": seconds,
        "gb_per_s": sync["bytes"] / seconds / 1e9,
        "limit_seconds": limit,
        "limited_by": "links between GPUs" if by_links > by_memory else "memory",
        "share_of_limit": limit / seconds,
        "extra_gib": sync["extra_bytes"] / 2**30,
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the seconds of each side beside the limit, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = result["rates"]
    figure, axes = plt.subplots(figsize=(6, 2.4))
    names = ["limit", *rates]
    axes.barh(names, [rates["ours"]["limit_seconds"], *(found["seconds"] for found in rates.values())])
    axes.set(xscale="log", xlabel="seconds", title=f"B1: weights of {result['ours']['shape']} on {result['device']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
