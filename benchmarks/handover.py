"""Memory between phases: ``python benchmarks/handover.py``: who has the GPU's memory, and what changing over takes.

The step of B3, with a sampler that sleeps at level 2 while the trainer works, and a trainer whose optimizer state,
gradients and parameters leave the GPU while the sampler works (all of it in pinned host memory but the gradients,
which nobody needs between two steps). Seconds per step, and the memory that each left to the other.
"""

import argparse
from pathlib import Path
from typing import Any

from common import default_device, facts, result_path, run_child, write_json
from floor import Work, floor_seconds
from ours import add_arguments, passed_on

NAMES = {
    "time/sleep_s": "the sampler's memory, awake and asleep, s",
    "time/offload_s": "the trainer's state, away and back, s",
    "perf/sleep_freed_gb": "the sampler left, GB",
    "perf/offloaded_gb": "the trainer left, GB",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, default_device())
    parser.set_defaults(steps=3, warmup=2, sleep_level=2)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.sleep_level:
        parser.error("--sleep-level 0: what a sampler that sleeps leaves is measured here: 1 or 2")
    found = run_child("ours.py", [*passed_on(options), "--offload"], options.timeout)
    rates = (options.devices * found["peaks"][name] for name in ("measured_flops", "measured_bytes_per_s"))
    floor = floor_seconds(Work(**found["floor_work"]), *rates)
    result: dict[str, Any] = {
        **facts(options.device),
        "benchmark": "memory between phases",
        "ours": found,
        "floor_s": floor,
        "times_floor": found["step_s"]["median"] / floor["step"],
    }
    write_json(result_path("handover", options.device, options.out), result)
    sync = found["phases"]["weight_sync"]["median"]
    step = found["step_s"]["median"]
    print(f"{found['shape']}: step {step:.3f} s, {result['times_floor']:.2f} times the floor, sync {sync:.4f} s")
    for name, meaning in NAMES.items():
        value = found["handover"][name]
        print(f"  {meaning:45s} {value['median']:8.3f} ({value['min']:.3f} to {value['max']:.3f})")


if __name__ == "__main__":
    main()
