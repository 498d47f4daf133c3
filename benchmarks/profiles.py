"""Profiles of single calls by torch's profiler, as tables in a text file: where the time of a benchmark goes.

Tables add up the seconds of kernels, also of those that ran side by side. So a line before them says for how long the
GPU had work at all, and before which kernels it had none.
"""

import cProfile
import io
import pstats
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from common import facts, timed
from lightning.pytorch.utilities import rank_zero_only
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

ROWS = 45
WAITS = 12  # kernels that the GPU waited for longest

Span = tuple[float, float, str]  # start and end of a kernel, and its name


def waits(spans: Iterable[Span]) -> tuple[float, Counter[str]]:
    """How long at least one kernel ran, and for how long none did before each of them, by name."""
    busy, until, idle = 0.0, None, Counter[str]()
    for start, end, name in sorted(spans):
        if until is not None and start > until:
            idle[name] += start - until
        begin = start if until is None else max(start, until)
        busy += max(end - begin, 0.0)
        until = end if until is None else max(until, end)
    return busy, idle


def of_functions(call: Callable[[], Any]) -> str:
    """Return what a call spends in which functions, as tables; Python's profiler makes short ones slower."""
    started = time.perf_counter()
    call()
    seconds = time.perf_counter() - started
    profiler = cProfile.Profile()
    profiler.runcall(call)
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text).strip_dirs()
    for order in ("cumulative", "tottime"):
        stats.sort_stats(order).print_stats(40)
    return f"# {seconds:.4f} s without the profiler\n{text.getvalue()}"


class Profile(pl.Callback):
    """Profiles one training step, and calls after it; rank 0 writes the tables.

    Args:
        step: Number of the step, from 0.
        path: Text file; what is there is replaced.
    """

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path
        self._profiler: profile | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self._profiler = self._start()

    def on_train_batch_end(self, *_: Any) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            self.path.unlink(missing_ok=True)
            self._write("update", profiler, None)

    def record(self, name: str, call: Callable[[], Any]) -> None:
        """Profile a call; its seconds without the profiler are taken before."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        seconds = timed(call, device)
        profiler = self._start()
        call()
        self._write(name, profiler, seconds)

    def _start(self) -> profile:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        profiler = profile(activities=activities)
        profiler.start()
        return profiler

    def _write(self, name: str, profiler: profile, seconds: float | None) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler.stop()
        if rank_zero_only.rank != 0:
            return
        averages = profiler.key_averages()
        on_cuda = torch.cuda.is_available()
        found = facts("cuda" if on_cuda else "cpu")
        lines = [f"# {name}: {found['command']}", f"# {found['device']}, {found['date']}, {found['versions']}"]
        if seconds is not None:
            lines.append(f"# {seconds:.4f} s without the profiler")
        if on_cuda:
            spans = [
                (event.time_range.start, event.time_range.end, event.name)
                for event in profiler.events()
                if event.device_type == DeviceType.CUDA and not event.is_user_annotation
            ]
            busy, idle = waits(spans)
            lines.append(f"# the GPU had work for {busy / 1e6:.4f} s, and none for {sum(idle.values()) / 1e6:.4f} s:")
            lines += [f"# {seconds / 1e6:.4f} s before {kernel}" for kernel, seconds in idle.most_common(WAITS)]
        orders = ["self_device_time_total", "self_cpu_time_total"] if on_cuda else ["self_cpu_time_total"]
        tables = [averages.table(sort_by=order, row_limit=ROWS, max_name_column_width=90) for order in orders]
        with self.path.open("a") as file:
            file.write("\n".join([*lines, "", *tables, ""]))
