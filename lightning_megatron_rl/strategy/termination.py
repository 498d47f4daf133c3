"""SIGTERM: every rank stops before the same batch, wherever the signal came in and whichever rank it hit."""

import signal
import threading
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import distributed as dist

EXIT_CODE = 128 + signal.SIGTERM  # what a shell reports for a process that SIGTERM has ended


class TerminationNotice:
    """Remembers a SIGTERM until all ranks can act on it together.

    Lightning's own handler runs a collective wherever the signal happens to arrive, such as within another collective
    or while the other ranks wait for the sampler, and the run hangs. This one only takes a note.
    """

    def __init__(self) -> None:
        self.received = False

    def install(self) -> None:
        """Take SIGTERM over from Lightning, which gives it back at the end of the run."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, signum: int, frame: Any) -> None:
        self.received = True

    def stop_if_received(self, device: torch.device) -> None:
        """Raise on every rank if any rank was told to stop; a collective.

        Raises:
            SIGTERMException: Ends the run through Lightning's `on_exception` hooks; the first rank exits with 143, the
                others with 0, so that a launcher does not take them for crashed and end the first one too early.
        """
        received = torch.tensor(int(self.received), device=device)
        dist.all_reduce(received, op=dist.ReduceOp.MAX)
        if int(received):
            raise SIGTERMException(EXIT_CODE if dist.get_rank() == 0 else 0)
