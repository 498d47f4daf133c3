"""A model's own loading of weights, recorded once as a list of plain copies and replayed from then on."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_megatron_rl.rollout.placement import Placement, view_all

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]


@dataclass
class CopyPlan:
    """What loading the tensors of `placements` copies, and where to.

    Example:
        ``plan.run(blocks)`` does what ``model.load_weights(...)`` did with the same blocks.
    """

    placements: list[Placement]
    targets: list[Tensor]  # views of the model's parameters
    sources: list[Placement]  # what is copied there, as parts of the same blocks

    @torch.no_grad()
    def run(self, blocks: Sequence[Tensor]) -> None:
        """Copy from blocks that are laid out as those of the recording."""
        torch._foreach_copy_(self.targets, view_all(self.sources, blocks))


@torch.no_grad()
def record_copies(
    load: LoadWeights, blocks: Sequence[Tensor], placements: list[Placement], parameters: Iterable[Tensor]
) -> CopyPlan | None:
    """Load the tensors, and return the plan of that; None if loading did more with them than copy parts of them.

    vLLM's loaders narrow a tensor to this rank's part and copy it into a part of a fused parameter. Anything else, such
    as a change of dtype before the copy or a product, makes a new tensor, which a list of copies cannot repeat.

    Args:
        load: The model's `load_weights`.
        blocks: Memory that holds the tensors.
        placements: The tensors.
        parameters: Parameters and buffers that may be copied into.
    """
    recorder = _Recorder(blocks, parameters)
    views = [(placement.name, placement.view(blocks)) for placement in placements]
    with recorder:
        load(views)
    if recorder.other_uses:
        return None
    return CopyPlan(placements, recorder.targets, recorder.sources)


class _Recorder(TorchDispatchMode):
    """Takes note of copies out of the blocks into the parameters, and of every other use of the blocks' values."""

    def __init__(self, blocks: Sequence[Tensor], parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._blocks = {block.untyped_storage().data_ptr(): number for number, block in enumerate(blocks)}
        self._starts = [block.data_ptr() for block in blocks]
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self.targets: list[Tensor] = []
        self.sources: list[Placement] = []
        self.other_uses: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        read = [tensor for tensor in given if self._block_of(tensor) is not None]
        if not read:
            return result
        if func is torch.ops.aten.copy_.default and self._is_parameter(args[0]) and len(read) == 1:
            self._note(args[0], args[1])
        elif any(self._block_of(leaf) is None for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            self.other_uses.append(str(func))  # a new tensor was made of the values; views are none
        return result

    def _note(self, target: Tensor, source: Tensor) -> None:
        number = self._block_of(source)
        assert number is not None
        shape = tuple(target.shape)
        source = source.expand(shape) if tuple(source.shape) != shape else source
        offset = source.data_ptr() - self._starts[number]
        self.targets.append(target.detach())
        self.sources.append(Placement("", number, source.dtype, shape, source.stride(), offset))

    def _block_of(self, tensor: Tensor) -> int | None:
        if tensor.device.type == "meta":
            return None
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    def _is_parameter(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._parameters
