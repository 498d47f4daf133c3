"""Records a model's own loading of weights as plain copies, and replays them in later updates."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_megatron_rl.compat.torch_names import TorchDispatchMode, tree_leaves
from lightning_megatron_rl.weights.copies import Copies
from lightning_megatron_rl.weights.placement import Placement, view_all

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]


class CopyPlan:
    """The copies that loading the tensors of `placements` consists of.

    Args:
        placements: The tensors.
        targets: Views of the model's parameters.
        sources: What is copied there, as parts of the same blocks.
    """

    def __init__(self, placements: list[Placement], targets: list[Tensor], sources: list[Placement]) -> None:
        self.placements = placements
        self.targets = targets
        self.sources = sources
        self._held: tuple[list[int], Copies] | None = None  # addresses of the blocks, and copies out of them

    @torch.no_grad()
    def run(self, blocks: Sequence[Tensor], *, stays: bool = False) -> None:
        """Copy from blocks that are laid out as those of the recording.

        Args:
            blocks: ``[bytes]`` uint8 each.
            stays: Whether they stay where they are until `let_go`: views of them are held for the next time.
        """
        starts = [block.data_ptr() for block in blocks]
        if self._held is None or self._held[0] != starts:
            self._held = starts, Copies(self.targets, view_all(self.sources, blocks))
        self._held[1].run()
        if not stays:
            self.let_go()

    def let_go(self) -> None:
        """Drop all references to the blocks' memory."""
        self._held = None


@torch.no_grad()
def record_copies(
    load: LoadWeights, blocks: Sequence[Tensor], placements: list[Placement], parameters: Iterable[Tensor]
) -> CopyPlan | None:
    """Load the tensors and return the plan of copies; None if loading does more than copy parts of them.

    vLLM's loaders narrow a tensor to this rank's part and copy it into a part of a fused parameter. Anything else, such
    as a change of dtype before the copy or a product, makes a new tensor, which a list of copies cannot repeat. A
    tensor whose rows lie apart is copied for the loader, and the plan takes the rows from where they lie.

    Args:
        load: The model's `load_weights`.
        blocks: Memory that holds the tensors.
        placements: The tensors.
        parameters: Parameters and buffers that may be copied into.
    """
    recorder = _Recorder(blocks, parameters)
    with recorder:
        load(recorder.tensors(placements))
    if recorder.other_uses:
        return None
    return CopyPlan(placements, recorder.targets, recorder.sources)


class _Recorder(TorchDispatchMode):
    """Records copies from the blocks into the parameters, and any other use of the blocks' values."""

    def __init__(self, blocks: Sequence[Tensor], parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._memories = blocks
        self._blocks = {_memory(block): number for number, block in enumerate(blocks)}
        self._starts = [block.data_ptr() for block in blocks]
        # copies of rows that lie apart, by their memory: others have it when they are gone
        self._copied: dict[int, tuple[StorageWeakRef, Placement]] = {}
        self._parameters = {_memory(parameter) for parameter in parameters}
        self._is_looking = True  # not at how the tensors themselves are made
        self.targets: list[Tensor] = []
        self.sources: list[Placement] = []
        self.other_uses: list[str] = []

    def tensors(self, placements: Iterable[Placement]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors; a copy whose rows lie apart is made when it is its turn."""
        for placement in placements:
            self._is_looking = False
            tensor = placement.tensor(self._memories)
            self._is_looking = True
            if _memory(tensor) not in self._blocks:
                self._copied[_memory(tensor)] = StorageWeakRef(tensor.untyped_storage()), placement
            yield placement.name, tensor
            del tensor  # the next may use its memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_looking:
            return result
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        read = [tensor for tensor in given if self._is_weight(tensor)]
        if not read:
            return result
        if func is torch.ops.aten.copy_.default and _memory(args[0]) in self._parameters and len(read) == 1:
            self._note(args[0].detach(), args[1])
        elif not all(self._is_weight(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            self.other_uses.append(str(func))  # a new tensor was made of the values; views are none
        return result

    def _note(self, target: Tensor, source: Tensor) -> None:
        shape = tuple(target.shape)
        source = source.expand(shape) if tuple(source.shape) != shape else source
        whole = self._copied_from(source)
        if whole is None:
            number = self._blocks[_memory(source)]
            offset = source.data_ptr() - self._starts[number]
            self._add(target, Placement("", number, source.dtype, shape, source.stride(), offset))
        elif (part := _rows_apart(whole, source)) is not None and target.is_contiguous():
            self._add(target.view(part.shape), part)
        else:
            self.other_uses.append("a part of rows that lie apart")

    def _add(self, target: Tensor, source: Placement) -> None:
        self.targets.append(target)
        self.sources.append(source)

    def _is_weight(self, tensor: Tensor) -> bool:
        if tensor.device.type == "meta":
            return False
        return _memory(tensor) in self._blocks or self._copied_from(tensor) is not None

    def _copied_from(self, tensor: Tensor) -> Placement | None:
        copied = self._copied.get(_memory(tensor))
        return None if copied is None or copied[0].expired() else copied[1]


def _rows_apart(whole: Placement, part: Tensor) -> Placement | None:
    """Return the blocks of rows that a part of their copy consists of; None if it is other than whole blocks."""
    size = prod(whole.shape[1:])  # elements of one block
    first, rest = divmod(int(part.storage_offset()), size)
    count, more = divmod(part.numel(), size)
    if rest or more or not part.is_contiguous():
        return None
    offset = whole.offset + first * whole.stride[0] * whole.dtype.itemsize
    return replace(whole, name="", shape=(count, *whole.shape[1:]), offset=offset, tensor_shape=tuple(part.shape))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
