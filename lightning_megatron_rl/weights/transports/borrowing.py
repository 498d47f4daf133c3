"""Weights that workers read where they lie, in the memory of several ranks."""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from lightning_megatron_rl.weights.cuda_memory import Handle, on_device, take_back
from lightning_megatron_rl.weights.lent import LentMemory, LentWeights, Readiness
from lightning_megatron_rl.weights.source import Lender
from lightning_megatron_rl.weights.transports.base import Ask, Part, Sent


class Borrowing:
    """Lets workers read weights where they lie, once buckets have shown what goes where in their models.

    Args:
        num_workers: vLLM's workers.
        gpus: Numbers by which they know GPUs, by `cuda_memory.identity`; none if a GPU cannot read another's memory.
        in_process: The only worker is in this process, which takes its own memory without a handle.
        before: Called before workers close whatever else they have open.
    """

    def __init__(
        self,
        num_workers: int,
        gpus: Mapping[str, int],
        *,
        in_process: bool = False,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.handles: list[Handle] = []  # of what the workers may have open
        self.peer_bytes = 0  # read out of other GPUs' memory in the last update, by the worker that read most
        self._num_workers = num_workers
        self._gpus = dict(gpus)
        self._in_process = in_process
        self._before = before
        self._may = True
        self._has_recorded = False  # whether the workers know what becomes of all weights that came in buckets
        self._lent: LentWeights | None = None  # what they read in place

    def note(self, *, recorded: bool) -> None:
        """Weights came in another way; whether in buckets, whose copies the workers have recorded."""
        self._has_recorded, self._lent, self.peer_bytes = recorded, None, 0

    def forget(self, *, workers_are_gone: bool = False) -> None:
        """See `Transport.forget`."""
        if workers_are_gone:
            self._take_back(self.handles)
            self._has_recorded = False
        self.handles, self._lent = [], None

    def send(self, lender: Lender, ask: Ask, version: int) -> Sent | None:
        """Let the workers read weights, if every rank's sampler can; None: send buckets.

        A collective of the ranks that lend.
        """
        readiness = Readiness.CANNOT
        if self._may and self._has_recorded and lender.gpus and lender.gpus <= self._gpus.keys():
            readiness = Readiness.NEEDS_PLACES if self._lent is None else Readiness.KNOWS_PLACES
        lent = lender.lend(readiness, self._num_workers, in_process=self._in_process)
        if lent is None:
            return None
        if lent is not self._lent:
            self._borrow(lent, ask)
        replayed = False
        if self._lent is not None:
            replayed = ask(("replace", Part(0, None, keep=True, stays=True, borrowed=True), version))
        if not lender.settle(self._lent is not None, apart=self._is_apart(lent)):
            return None
        return Sent(lent.num_bytes, 0, replayed)

    def _borrow(self, lent: LentWeights, ask: Ask) -> None:
        """Tell the workers where weights lie; they close everything else."""
        self._before()
        memory = [[self._open_by(one, worker) for one in lent.memories] for worker in range(self._num_workers)]
        new = [handle for handle in chain(*memory) if not isinstance(handle, Tensor)]
        self.handles += new  # what was open is closed by each worker first, if it lives
        self._lent = None
        peer_bytes: list[int | None] = ask(("borrow", lent.weights, memory))
        read = [size for size in peer_bytes if size is not None]
        if len(read) == len(peer_bytes):
            self.handles = new
            self._lent, self.peer_bytes = lent, max(read)
            return
        self._may = False  # nor the next time
        ask(("let_go",))  # those that could
        self.handles = []
        self._take_back(new)  # those that could not have opened nothing that they could close

    def _is_apart(self, lent: LentWeights) -> bool:
        """Whether the only reader reads nothing but its own process's memory."""
        own = {memory.gpu for memory in lent.memories if memory.block is not None}
        others = {memory.gpu for memory in lent.memories if memory.block is None}
        return self._in_process and self.peer_bytes == 0 and not own & others

    def _open_by(self, memory: LentMemory, worker: int) -> Any:
        """What a worker opens memory with: a handle, or in this process the memory itself."""
        if memory.block is not None:
            return memory.block
        return on_device(memory.handles[worker], self._gpus[memory.gpu])

    @staticmethod
    def _take_back(handles: list[Handle]) -> None:
        for handle in handles:
            take_back(handle)
