"""An optimizer's state as a checkpoint has it: a tensor per parameter and moment, of which each rank gives its part.

Megatron gathers the state of its distributed optimizer on every replica before it saves. Nothing is gathered here: a
rank's slice of a parameter, which is a range of its elements in memory order, is cut into boxes, and boxes are what a
distributed checkpoint is made of. Names and shapes are those of Megatron's own ``fully_reshardable`` format.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_megatron_rl.checkpoints.main_parameters import MAIN, give_state, whole_state
from lightning_megatron_rl.compat.cpu_optimizer import is_on_host, saved_groups, take_loaded_state

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
    from megatron.core.optimizer import MegatronOptimizer as CoreOptimizer

_PREFIX = "optimizer.state"
_STEP = "step"  # kept in the parameter groups
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Slice:
    """The part of one model parameter whose optimizer state this rank has."""

    parameter: Tensor
    start: int  # first element of the local parameter, in memory order
    stop: int
    tensors: dict[str, Tensor]  # main parameter and moments, each [stop - start]
    replica: int | None  # which copy of this slice this is; None where each data-parallel rank has one


class OptimizerState:
    """Main parameters, moments, averages, parameter groups and loss scale of Megatron's optimizers.

    Args:
        parts: The optimizers, which have taken a step or had their moments made.
        model: Megatron's sharded state dict of the parameters.
        averages: Averages of the main parameters by name, a tensor per slice in the order of `slices`.
        is_loading: Make tensors to load into, in place of the optimizers' own.
    """

    def __init__(
        self,
        parts: Sequence["CoreOptimizer"],
        model: dict[str, Any],
        averages: Mapping[str, Sequence[Tensor]],
        *,
        is_loading: bool,
    ) -> None:
        from megatron.core.dist_checkpointing.dict_utils import nested_values

        self._parts = [part for part in parts if not part.is_stub_optimizer]
        places = {id(place.data): place for place in nested_values(model) if isinstance(place.data, Tensor)}
        self._slices: list[tuple[CoreOptimizer, list[Slice]]] = []
        self._tensors: list[ShardedTensor] = []
        for part in self._parts:
            found = list(slices(part))
            if is_loading:
                found = [
                    replace(own, tensors={n: torch.empty_like(t) for n, t in own.tensors.items()}) for own in found
                ]
            self._slices.append((part, found))
            for own in found:
                for name, state in own.tensors.items():
                    self._tensors += _sharded(places[id(own.parameter)], own, name, state)
        self._averages: list[tuple[Tensor, Tensor]] = []  # each with the tensor that it is loaded into
        everything = [own for _, found in self._slices for own in found]
        for name, tensors in averages.items():
            for own, average in zip(everything, tensors, strict=True):
                target = torch.empty_like(average) if is_loading else average
                self._averages.append((average, target))
                self._tensors += _sharded(places[id(own.parameter)], own, f"average_{name}", target)

    def sharded(self) -> dict[str, Any]:
        """Return what is saved, or asked for."""
        groups = [
            group
            for part in self._parts
            for group in (saved_groups(part.optimizer) if is_on_host(part) else part.optimizer.param_groups)
        ]
        scalers = [scaler.state_dict() for part in self._parts if (scaler := _grad_scaler(part)) is not None]
        return {
            "tensors": {str(number): tensor for number, tensor in enumerate(self._tensors)},
            "groups": [{name: value for name, value in group.items() if name != "params"} for group in groups],
            "grad_scaler": scalers[0] if scalers else None,
        }

    def load(self, loaded: dict[str, Any], groups: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Give the optimizers what was loaded.

        Args:
            loaded: What `sharded` asked for.
            groups: The saved parameter groups of each part, in its own order.
        """
        for part, matched in zip(self._parts, groups, strict=True):
            state = part.state_dict()
            inner = state.get("optimizer", state)
            inner["param_groups"] = [
                {**own, **{name: value for name, value in saved.items() if name != "params"}}
                for own, saved in zip(inner["param_groups"], matched, strict=True)
            ]
            if _grad_scaler(part) is not None and loaded["grad_scaler"] is not None:
                state["grad_scaler"] = loaded["grad_scaler"]
            part.load_state_dict(state)
        for part, found in self._slices:
            give_tensors(part, found)
        for average, target in self._averages:
            average.copy_(target)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut a range of the elements of a tensor, in memory order, into boxes: (offset, size) each, in the same order.

    Example:
        ``list(boxes((3, 4), 2, 9)) == [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]``
    """
    if start == stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows are [first, last)
    if first > last:  # within one row
        yield from _in_row(last, shape[1:], start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(first - 1, shape[1:], start - (first - 1) * row, row)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < stop:
        yield from _in_row(last, shape[1:], 0, stop - last * row)


def _in_row(row: int, shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    for offset, size in boxes(shape, start, stop):
        yield (row, *offset), (1, *size)


def slices(part: "CoreOptimizer") -> Iterator[Slice]:
    """Yield what this rank has of each parameter of one of Megatron's three kinds of optimizers."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if isinstance(part, DistributedOptimizer):
        buckets = [bucket for buffer in part.gbuf_ranges for ranges in buffer.values() for bucket in ranges]
        for parameter, found in (
            (parameter, at) for bucket in buckets for parameter, at in bucket["param_map"].items()
        ):
            tensors = whole_state(part, parameter)
            own = found["param"]
            yield Slice(parameter, own.start, own.end, _flat(tensors), part.distributed_optimizer_instance_id)
        return
    for parameter, main in _main_parameters(part):
        yield Slice(parameter, 0, parameter.numel(), _flat({MAIN: main, **part.optimizer.state[main]}), None)


def _main_parameters(part: "CoreOptimizer") -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter with the one that the optimizer steps: a copy in full precision, or itself."""
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    if isinstance(part, Float16OptimizerWithFloat16Params):
        for half, full in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(half, full, strict=True)
        groups = part.fp32_from_fp32_groups
    else:
        groups = [group["params"] for group in part.optimizer.param_groups]
    yield from ((parameter, parameter) for group in groups for parameter in group)


def _flat(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """What is kept per element: not a count of steps, which is a tensor in some optimizers."""
    found = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor) and name != _STEP}
    return {name: tensor.detach().view(-1) for name, tensor in found.items()}


def _sharded(place: "ShardedBase", own: Slice, name: str, state: Tensor) -> Iterator["ShardedTensor"]:
    """Yield the boxes of one state tensor, where the boxes of its parameter are in the model."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    whole = [place]
    if isinstance(place, ShardedTensorFactory):  # such as the two halves of a gated layer's first weight
        whole = list(nested_values(place.build()))
    for target in whole:
        assert isinstance(target, ShardedTensor)
        assert target.data is not None
        assert target.data.is_contiguous()
        # where this part of the parameter begins, in elements
        origin = target.data.storage_offset() - own.parameter.storage_offset()
        start, stop = max(own.start - origin, 0), min(own.stop - origin, target.data.numel())
        at = origin + start - own.start  # in `state`
        for offset, size in boxes(target.local_shape, start, max(start, stop)):
            count = math.prod(size)
            before = (1,) * target.prepend_axis_num
            offsets = ((0,) * target.prepend_axis_num) + offset
            yield replace(
                target,
                key=f"{_PREFIX}.{name}.{target.key}",
                data=state[at : at + count].view(before + size),
                dtype=state.dtype,
                local_shape=before + size,
                global_offset=tuple(map(sum, zip(target.global_offset, offsets, strict=True))),
                axis_fragmentations=None,  # boxes of many sizes
                prepend_axis_num=0,
                replica_id=target.replica_id if own.replica is None else (*target.replica_id[:-1], own.replica),  # type: ignore[index]
            )
            at += count


def _grad_scaler(part: "CoreOptimizer") -> Any:
    """The loss scale, of optimizers for 16 bits; None if it is not scaled."""
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    return part.grad_scaler if isinstance(part, MixedPrecisionOptimizer) else None


@torch.no_grad()
def give_tensors(part: "CoreOptimizer", loaded: Sequence[Slice]) -> None:
    """Copy tensors, of all slices in the order of `slices`, to where the optimizer has them."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if isinstance(part, DistributedOptimizer):
        for own in loaded:
            give_state(part, own.parameter, own.tensors)
    else:
        for own, target in zip(loaded, slices(part), strict=True):
            for name, tensor in target.tensors.items():
                tensor.copy_(own.tensors[name])
    if is_on_host(part):
        take_loaded_state(part.optimizer)
