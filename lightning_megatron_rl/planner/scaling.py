"""The same run on more GPUs: what each number of them would do, by the formulas of `timing`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_megatron_rl.planner.hardware import Hardware
from lightning_megatron_rl.planner.run import Run
from lightning_megatron_rl.planner.search import search
from lightning_megatron_rl.planner.timing import LINK, Work


@dataclass(frozen=True)
class Scaled:
    """A run on so many GPUs, in the fastest layout that fits; without a run, why there is none."""

    gpus: int
    run: Run | None
    refusal: str = ""

    @property
    def samples_per_s(self) -> float:
        """Sequences that are trained on, per second of a step; 0 without a run."""
        return self.run.work.sequences / self.run.step_seconds if self.run else 0.0


def scale(run: Run, gpus: Sequence[int], *, same_batch: bool = False) -> list[Scaled]:
    """Return the run on each number of GPUs.

    Args:
        run: With its own number of GPUs, and its own batch.
        gpus: Numbers of GPUs.
        same_batch: Every number of GPUs has the run's batch; else it grows with the GPUs.

    Raises:
        ValueError: A batch that grows so would be no whole number.

    Example:
        ``scale(run, [8, 16])[1].run.work.sequences == 2 * scale(run, [8])[0].run.work.sequences``
    """
    works = {count: run.work if same_batch else grown(run.work, count, run.world) for count in gpus}
    found = []
    for count, work in works.items():
        try:
            (best,) = search(replace(run, world=count, work=work), count=1)
        except ValueError as error:
            found.append(Scaled(count, None, str(error)))
        else:
            found.append(Scaled(count, best.run))
    return found


def grown(work: Work, gpus: int, before: int) -> Work:
    """Return the work of a step on `gpus` GPUs, where it was `work` on `before`.

    Raises:
        ValueError: The batch would be no whole number.

    Example:
        ``grown(Work(sequences=64, tokens=100), 16, 8).sequences == 128``
    """
    batch = work.batch
    if batch * gpus % before:
        raise ValueError(
            f"data.batch_size={batch} on {before} GPU(s) would be {batch} * {gpus} / {before} ="
            f" {batch * gpus / before:g} on {gpus}: choose another number of GPUs, or keep the batch"
        )
    sizes = {name: getattr(work, name) * gpus // before for name in ("prompts", "sequences", "rows")}
    return replace(work, **sizes)


def efficiency(rows: Sequence[Scaled]) -> list[float | None]:
    """Return samples per second and GPU, each as a share of the first row's that has a run; None without one.

    Example:
        Twice the samples per second on twice the GPUs: ``[1.0, 1.0]``.
    """
    rates = [row.samples_per_s / row.gpus if row.run else None for row in rows]
    first = next((rate for rate in rates if rate), 1.0)
    return [None if rate is None else rate / first for rate in rates]


def push_seconds(weight_bytes: float, engines: int, kind: Hardware, *, senders: int = 1) -> float:
    """Return the seconds of a push of all weights to engines on other hosts.

    A sending rank sends its share of the whole model to each engine, over its own link to the network; engines hand it
    on among their own workers.

    Args:
        weight_bytes: Of the model. # bytes
        engines: That get them.
        kind: The GPUs, whose network it is.
        senders: Ranks that send, each a share. Today one of each replica does; a replica has engines of its own.

    Example:
        16 GB to 4 engines over 50 GB/s, of which 0.7 is reached: ``push_seconds(16e9, 4, kind)`` is 1.83.
    """
    return weight_bytes * engines / senders / (kind.network_bytes_per_s * LINK)
