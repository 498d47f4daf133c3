"""GPUs for sides of benchmarks that run at the same time on one machine, and their part of its CPU cores."""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch


def visible() -> list[str]:
    """Return the GPUs of this process, as ``CUDA_VISIBLE_DEVICES`` calls them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())]


@contextmanager
def own_gpus(count: int = 1) -> Iterator[str]:
    """Wait for GPUs that no other side has, of whichever benchmark; yield their ``CUDA_VISIBLE_DEVICES``.

    Processes that this thread starts meanwhile get as large a part of the CPU cores as of the GPUs.

    Args:
        count: So many.

    Raises:
        ValueError: The machine has fewer.
    """
    names, cores = visible(), sorted(os.sched_getaffinity(0))
    if count > len(names):
        raise ValueError(f"{count} GPUs for a side: there are {len(names)}")
    with _take(names, count) as places:
        each = len(cores) // len(names)
        mine = {core for place in places for core in cores[place * each : (place + 1) * each]}
        os.sched_setaffinity(0, mine or cores)  # of this thread, and what it starts
        try:
            yield ",".join(names[place] for place in places)
        finally:
            os.sched_setaffinity(0, cores)


@contextmanager
def _take(names: list[str], count: int) -> Iterator[list[int]]:
    """Hold the locks of `count` GPUs, all or none of them; yield their places.

    Whoever waits keeps the others waiting: else those that need one GPU would take each that gets free.
    """
    folder = Path(tempfile.gettempdir()) / "lightning_megatron_rl_benchmark_gpus"
    folder.mkdir(exist_ok=True)
    with ExitStack() as held:
        with (folder / "next").open("w") as door:
            fcntl.flock(door, fcntl.LOCK_EX)  # all locks are let go with the process, however it ends
            while len(places := _lock(folder, names, count, held)) < count:
                held.close()
                time.sleep(0.2)
        yield places


def _lock(folder: Path, names: list[str], count: int, held: ExitStack) -> list[int]:
    """Lock at most `count` GPUs that nobody has; return their places."""
    places: list[int] = []
    for place, name in enumerate(names):
        if len(places) == count:
            break
        file = held.enter_context((folder / name).open("w"))
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            places.append(place)
    return places
