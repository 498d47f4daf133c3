"""Lends a split model's parameters to samplers, by agreement of all ranks."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron_rl.compat.torch_names import group_timeout
from lightning_megatron_rl.weights import cuda_memory
from lightning_megatron_rl.weights.cuda_memory import Handle, whole_storage
from lightning_megatron_rl.weights.lent import LentMemory, LentPiece, LentWeight, LentWeights, Readiness
from lightning_megatron_rl.weights.pieces import Groups, Piece, TensorPlan
from lightning_megatron_rl.weights.rectangles import matrix_shape

# Of one rank's memory. Parameters of Megatron's distributed optimizer lie in a few; without it each has its own.
MOST_BLOCKS = 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Held:
    """What a rank has."""

    rank: int  # global
    gpu: str
    readers: int
    in_process: bool  # the only reader is this rank's process
    places: dict[int, tuple[int, int, int]]  # by number of the task: block, bytes from its start, columns


class Lending:
    """Agreements between the ranks that share a model, or its experts.

    Args:
        plans: What each tensor consists of.
        parameters: This rank's, by number of the conversion task.
        groups: The ranks that share a model without its experts, and those that share its experts.
        held: By plan: the pieces of its tensor that this rank has, also those that the plan takes from another.
        identify: What tells a parameter's device from others; None: others cannot read it.
        share: Makes what one reader opens a block of memory with.
    """

    def __init__(
        self,
        plans: Sequence[TensorPlan],
        parameters: Sequence[Tensor | None],
        groups: Groups,
        held: Sequence[Sequence[Piece]],
        identify: Callable[[torch.device], str | None] = cuda_memory.identity,
        share: Callable[[Tensor, int], Handle] = cuda_memory.lend,
    ) -> None:
        self._plans = plans
        self._parameters = parameters
        self._groups = groups
        self._own_pieces = [{piece.rectangle: piece for piece in pieces} for pieces in held]
        self._share = share
        self._device = next(parameter.device for parameter in parameters if parameter is not None)
        self._gpu = identify(self._device)
        self.gpus, self._all = self._meet()
        self._places: list[int] = []
        self._lent: LentWeights | None = None
        self._least_ready = Readiness.CANNOT  # of the last agreement
        self._is_apart = False  # no rank reads another's memory
        self._asked: tuple[dist.Work, Tensor] | None = None  # an agreement that goes on beside the copies

    def _meet(self) -> tuple[frozenset[str], dist.ProcessGroup | None]:
        """Return whose memory the parameters lie in, and all ranks concerned; nothing if any rank cannot lend its own.

        A collective of the world. The group is one of gloo: a rank that waits for others by NCCL keeps its GPU busy,
        which its sampler is about to read with.
        """
        ranks = [set(dist.get_process_group_ranks(group)) for group in self._groups]
        nested = ranks[0] <= ranks[1] or ranks[1] <= ranks[0]
        concerned = sorted(ranks[0] | ranks[1])
        mine = self._gpu if nested else None
        world: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(world, (mine, concerned))
        if any(gpu is None for gpu, _ in world):
            return frozenset(), None
        own, timeout = None, group_timeout(self._groups[0], self._device)
        for members in sorted({tuple(members) for _, members in world}):
            group = dist.new_group(list(members), timeout, backend="gloo", group_desc="WEIGHTS_GROUP_GLOO")
            own = group if list(members) == concerned else own
        return frozenset(world[rank][0] for rank in concerned), own

    def agree(
        self, readiness: Readiness, readers: int, places: list[int], *, in_process: bool = False
    ) -> tuple[bool, LentWeights | None]:
        """Return whether weights are lent, and to this rank's readers what they need.

        As long as no rank reads another's memory, one that is ready does not wait for the others: `settle` does.

        Args:
            readiness: Of this rank's sampler.
            readers: Its processes.
            places: Where this rank's parameters are.
            in_process: The only reader is this process.
        """
        if not self.gpus:
            return False, None
        if places != self._places:
            few = len(self._blocks()) <= MOST_BLOCKS
            readiness = min(readiness, Readiness.NEEDS_PLACES) if few else Readiness.CANNOT
        if self._is_apart:
            self._asked = self._ask(readiness)
            if readiness == Readiness.KNOWS_PLACES:
                return True, self._lent
            self._hear()  # the others have begun, so that it is too late for places
            return False, None
        self._least_ready = Readiness(self._least(readiness))
        if self._least_ready == Readiness.CANNOT:
            return False, None
        if self._least_ready == Readiness.NEEDS_PLACES:
            self._places = places if self._describe(readers, in_process=in_process) else []
        return bool(self._places), self._lent

    def settle(self, loaded: bool, *, apart: bool = False) -> bool:
        """Return whether all have what they were lent; until then no rank goes on.

        Args:
            loaded: Whether this rank's readers have.
            apart: They have read no memory but that of their own process.
        """
        if self._asked is not None:
            assert loaded
            return self._hear()
        least = self._least(int(loaded) + int(loaded and apart))
        self._is_apart = least == 2 and self._least_ready == Readiness.KNOWS_PLACES
        return bool(least)

    def let_go(self) -> None:
        """Forget what was lent."""
        self._places, self._lent = [], None
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def _least(self, value: int) -> int:
        """The minimum over the ranks, after all earlier work of their GPUs."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        work, box = self._ask(value)
        work.wait()
        return int(box)

    def _ask(self, value: int) -> tuple[dist.Work, Tensor]:
        """Begin to find the minimum over the ranks."""
        box = torch.tensor([value])
        work = dist.all_reduce(box, op=dist.ReduceOp.MIN, group=self._all, async_op=True)
        assert work is not None
        return work, box

    def _hear(self) -> bool:
        """Whether all ranks were ready where none has waited; if not, all of them begin anew the next time."""
        assert self._asked is not None
        (work, box), self._asked = self._asked, None
        work.wait()
        if int(box) < Readiness.KNOWS_PLACES:
            self._places, self._is_apart = [], False
        return self._is_apart

    def _describe(self, readers: int, *, in_process: bool) -> bool:
        """Tell all ranks where this one's parameters lie; returns whether every rank could, and if not, never again."""
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # of what was lent before
        blocks = self._blocks()
        assert self._gpu is not None
        own = dist.get_rank()
        held = self._gather(_Held(own, self._gpu, readers, in_process, self._find(blocks)))
        mine: dict[int, list[list[Handle]]] | None = None
        try:
            mine = {
                other.rank: [
                    # a process cannot open its own memory
                    [self._share(block, 0) for _ in range(0 if other.rank == own and in_process else other.readers)]
                    for block in blocks.values()
                ]
                for other in held.values()
            }
        except (RuntimeError, OSError) as error:
            log.warning("this rank's memory cannot be lent, so that weights are pushed in buckets: %s", error)
        handles = self._gather(mine)
        self._lent = None
        if None in handles.values():
            self.gpus = frozenset()
            return False
        if not readers:
            return True
        memories: list[LentMemory] = []
        first: dict[int, int] = {}
        for rank, other in held.items():
            first[rank] = len(memories)
            itself = blocks.values() if rank == own and in_process else repeat(None)
            memories += map(partial(LentMemory, other.gpu), map(tuple, handles[rank][own]), itself)
        weights = {}
        for plan, here in zip(self._plans, self._own_pieces, strict=True):
            # what all ranks have, e.g. norms, a sampler in this process takes from here
            pieces = [here.get(piece.rectangle, piece) if in_process else piece for piece in plan.pieces]
            lent = tuple(self._piece(plan, piece, held, first) for piece in pieces)
            weights[plan.name] = LentWeight(plan.shape, plan.dtype, lent)
        self._lent = LentWeights(weights, memories)
        return True

    def _piece(self, plan: TensorPlan, piece: Piece, held: dict[int, _Held], first: dict[int, int]) -> LentPiece:
        owner = dist.get_global_rank(self._groups[plan.is_expert], piece.source)
        block, offset, columns = held[owner].places[plan.task]
        rows = piece.rows
        return LentPiece(
            memory=first[owner] + block,
            offset=offset + (rows.start * columns + piece.first_column) * plan.dtype.itemsize,
            blocks=rows.count,
            size=rows.size,
            step=rows.step * columns,
            stride=columns,
            width=piece.width,
            row=piece.row,
            column=piece.column,
        )

    def _blocks(self) -> dict[int, Tensor]:
        """The memory that parameters lie in, by its address."""
        storages: dict[int, Tensor] = {}
        for parameter in self._parameters:
            if parameter is not None:
                storages.setdefault(parameter.untyped_storage().data_ptr(), parameter)
        return {address: whole_storage(parameter.detach()) for address, parameter in storages.items()}

    def _find(self, blocks: dict[int, Tensor]) -> dict[int, tuple[int, int, int]]:
        numbers = {address: number for number, address in enumerate(blocks)}
        places = {}
        for task, parameter in enumerate(self._parameters):
            if parameter is not None:
                block = numbers[parameter.untyped_storage().data_ptr()]
                offset = int(parameter.storage_offset()) * parameter.itemsize
                places[task] = block, offset, matrix_shape(parameter.shape)[1]
        return places

    def _gather(self, value: Any) -> dict[int, Any]:
        """What all ranks concerned say, by global rank."""
        assert self._all is not None
        values: list[Any] = [None] * self._all.size()
        dist.all_gather_object(values, (dist.get_rank(), value), group=self._all)
        return dict(values)
