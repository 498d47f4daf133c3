"""Whether a long GRPO run's memory is bounded: ``python benchmarks/memory_growth.py --steps 2000``.

The tiny model on a CPU with vLLM; resident memory of the trainer and of the sampler's process after each step, and
what remains of Python's objects and of glibc's heap. It writes ``results/memory_growth.json``, with a plot beside it.
"""

import argparse
import ctypes
import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
from common import RESULTS, facts, make_trainer, tiny_grpo, write_json

PROMPTS, GENERATIONS, PROMPT_TOKENS, TOKENS = 4, 4, 16, 8
DATA_STEPS = 64  # of an epoch
MIB = 2**20


class MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`: bytes of the heap that are in use (`uordblks`), and free (`fordblks`)."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = list(zip(_names, [ctypes.c_size_t] * len(_names), strict=True))


def heap() -> tuple[float, float]:
    """Return MiB of glibc's heap that are in use, mapped blocks included, and that are free but kept."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = MallInfo
    found = library.mallinfo2()
    return (found.uordblks + found.hblkhd) / MIB, found.fordblks / MIB


class Memory(pl.Callback):
    """Takes note of the memory of both processes after every so many steps."""

    def __init__(self, every: int, seconds: float) -> None:
        self.every = every
        self.deadline = time.monotonic() + seconds
        self.points: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step % self.every:
            return
        collected = gc.collect()
        in_use, free = heap()
        self.points.append(
            {
                "step": trainer.global_step,
                "trainer_mib": psutil.Process().memory_info().rss / MIB,
                "sampler_mib": psutil.Process(module.engine.pid).memory_info().rss / MIB,
                "heap_in_use_mib": in_use,
                "heap_free_mib": free,
                "objects": len(gc.get_objects()),
                "collected": collected,
                "threads": psutil.Process().num_threads(),
                "files": psutil.Process().num_fds(),
            }
        )
        print({name: round(value, 1) for name, value in self.points[-1].items()}, flush=True)
        if time.monotonic() > self.deadline:
            trainer.should_stop = True


def slope(points: list[dict[str, float]], name: str) -> float:
    """Return the growth of the second half by least squares. # per 1000 steps"""
    half = points[len(points) // 2 :]
    steps, values = [point["step"] for point in half], [point[name] for point in half]
    centre, mean = sum(steps) / len(steps), sum(values) / len(values)
    spread = sum((step - centre) ** 2 for step in steps)
    return 1000 * sum((s - centre) * (v - mean) for s, v in zip(steps, values, strict=True)) / spread if spread else 0.0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train and return the points."""
    from lightning.pytorch.loggers import CSVLogger

    memory = Memory(options.every, options.seconds)
    with tempfile.TemporaryDirectory() as directory:
        module, data = tiny_grpo(
            Path(directory),
            prompts=PROMPTS,
            generations=GENERATIONS,
            prompt_tokens=PROMPT_TOKENS,
            tokens=TOKENS,
            steps=DATA_STEPS,
            ignore_eos=False,
        )
        trainer = make_trainer("cpu", max_steps=options.steps, callbacks=[memory], precision="32-true")
        trainer.logger = CSVLogger(directory)  # as runs have one
        trainer.fit(module, data)
        module.close_engine()
    names = ("trainer_mib", "sampler_mib", "heap_in_use_mib", "objects", "threads", "files")
    return {
        **facts("cpu"),
        "benchmark": "memory of a long run",
        "steps": memory.points[-1]["step"],
        "per_1000_steps": {name: slope(memory.points, name) for name in names},
        "points": memory.points,
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw resident memory of both processes against steps."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    steps = [point["step"] for point in result["points"]]
    axes.plot(steps, [point["trainer_mib"] for point in result["points"]], label="trainer")
    axes.plot(steps, [point["sampler_mib"] for point in result["points"]], label="sampler")
    axes.set(xlabel="GRPO steps", ylabel="resident memory, MiB", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=20, help="steps between two measurements")
    parser.add_argument("--seconds", type=float, default=7200.0, help="end the run after so long")
    parser.add_argument("--out", type=Path, default=RESULTS / "memory_growth.json")
    options = parser.parse_args()
    result = measure(options)
    write_json(options.out, result)
    plot(result, options.out.with_suffix(".png"))
    print(result["per_1000_steps"])


if __name__ == "__main__":
    main()
