"""Signals that stop a run: noted when they arrive, answered by all ranks together."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import distributed as dist

from lightning_megatron_rl.utilities.notices import tell_loss

_IMPATIENT = 1.0  # seconds after which a second Ctrl-C counts: a launcher passes the first one on once more


class StopNotice:
    """Remembers a signal until all ranks can act on it together.

    Lightning's own handlers run collectives wherever a signal happens to arrive, such as within another collective or
    while the other ranks wait for the sampler, and the run hangs. This one only takes a note.

    Args:
        signals: Those to take over; Lightning gives them back at the end of the run.
    """

    def __init__(self, signals: Sequence[int]) -> None:
        self.signals = signals
        self.received = 0  # number of the first signal that came in
        self._when = 0.0

    def install(self) -> None:
        """Take the signals over."""
        if threading.current_thread() is threading.main_thread():
            for number in self.signals:
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        if not self.received:
            self.received, self._when = number, time.monotonic()
            rank_zero_info(f"{signal.Signals(number).name}: the run stops, with a checkpoint, after this batch.")
        elif number == signal.SIGINT and time.monotonic() - self._when > _IMPATIENT:
            signal.default_int_handler(number, frame)

    def agree(self, device: torch.device, wants_end: bool = False) -> tuple[int, bool]:
        """Return the number of a signal that any rank received, or 0, and whether any wants the end; a collective."""
        received = torch.tensor([self.received, wants_end], device=device)
        dist.all_reduce(received, op=dist.ReduceOp.MAX)
        number, wanted = received.tolist()
        return number, bool(wanted)


def exit_code(number: int) -> int:
    """Return what a shell reports for a process that a signal has ended."""
    return 128 + number


def requeue_job() -> None:
    """Have SLURM put this job back into its queue, which ends it."""
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=60.0)
    except (OSError, subprocess.SubprocessError) as error:
        rank_zero_only(tell_loss)(
            f"SLURM job {job} was not requeued: {error}. Submit it again: it goes on from its checkpoint."
        )
