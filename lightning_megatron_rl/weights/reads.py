"""Records which parts of its weights a model's loader reads: what a worker needs of later updates."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron_rl.compat.torch_names import TorchDispatchMode, changes_arguments, tree_leaves
from lightning_megatron_rl.weights.rectangles import Rectangle, disjoint, rectangle_of

MOST_PARTS = 256  # of a tensor that is read in parts; one of more is sent whole


@dataclass(frozen=True)
class Read:
    """What is read of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Rectangle, ...]  # of the tensor as a matrix; they do not overlap

    @property
    def num_bytes(self) -> int:
        """Size of the parts."""
        return sum(part.size for part in self.parts) * self.dtype.itemsize

    def to_plain(self) -> list[Any]:
        """Return it as JSON has it."""
        dtype = str(self.dtype).removeprefix("torch.")
        return [list(self.shape), dtype, [part.to_plain() for part in self.parts]]

    @classmethod
    def from_plain(cls, plain: Any) -> "Read":
        """Return what `to_plain` was given.

        Raises:
            ValueError: The dtype is none of torch's, or a part is none of the tensor's.
        """
        shape, dtype, parts = plain
        sizes = tuple(int(size) for size in shape)
        return cls(sizes, dtype_of(dtype), tuple(Rectangle.from_plain(part, sizes) for part in parts))


Reads = dict[str, Read]
"""What is read of a model's tensors, by name."""


def dtype_of(name: str) -> torch.dtype:
    """Return one of torch's dtypes by its name, such as "bfloat16".

    Raises:
        ValueError: It is none.
    """
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is none of torch's dtypes")
    return found


def record_reads(
    load: Callable[[Iterator[tuple[str, Tensor]]], Any],
    weights: Sequence[tuple[str, Tensor]],
    parameters: Callable[[], Iterable[Tensor]],
) -> Reads:
    """Load the weights and return what of them was read.

    Views of a tensor read nothing of it. Any other operation reads all of the view that it is given: a copy into a
    parameter, a change of dtype, a product. A tensor of which something is read that is not a rectangle, that is
    written to, or whose memory a parameter has taken, is read whole.

    Args:
        load: Takes all weights.
        weights: Names and contiguous tensors on one device, each in memory that nobody else has.
        parameters: The model's parameters and buffers when they are loaded.
    """
    recorder = _Recorder(weights)
    with recorder:
        load(iter(weights))
    for parameter in parameters():
        recorder.note_owner(parameter)
    return {name: recorder.read(name, tensor) for name, tensor in weights}


def prove_reads(
    load: Callable[[Iterator[tuple[str, Tensor]]], Any],
    tensors: Mapping[str, Tensor],
    reads: Reads,
    parameters: Callable[[], Iterable[Tensor]],
) -> None:
    """Load weights of which nothing is there but what was read before, and NaN in place of the rest.

    Args:
        load: Takes all weights.
        tensors: By name, as in `record_reads`.
        reads: What was read of them.
        parameters: As in `record_reads`.

    Raises:
        RuntimeError: Other parts are read than before, or a NaN has come into a parameter.
    """
    before = sum(map(_has_nan, parameters()))
    found = record_reads(load, list(tensors.items()), parameters)
    for name, read in reads.items():
        if found[name] != read:
            raise RuntimeError(f"{name} is not loaded as before: {found[name].parts} were read, not {read.parts}")
    if sum(map(_has_nan, parameters())) > before:
        raise RuntimeError("the model's loader reads parts of weights in a way that is not seen")


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


class _Recorder(TorchDispatchMode):
    """Notes each view of the weights that an operation takes values from."""

    def __init__(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._tensors = dict(weights)
        places: dict[int, list[tuple[int, str]]] = {}
        for name, tensor in weights:
            if tensor.numel():
                places.setdefault(_memory(tensor), []).append((tensor.data_ptr(), name))
        self._places = {memory: sorted(found) for memory, found in places.items()}
        self._parts: dict[str, set[Rectangle]] = {name: set() for name in self._tensors}
        self._wholes: set[str] = set()

    def read(self, name: str, tensor: Tensor) -> Read:
        """Return what was read of a tensor."""
        parts = disjoint(self._parts[name])
        if name in self._wholes or len(parts) > MOST_PARTS:
            parts = [Rectangle.whole(tensor.shape)]
        return Read(tuple(tensor.shape), tensor.dtype, tuple(parts))

    def note_owner(self, parameter: Tensor) -> None:
        """Note a parameter whose memory may be that of a weight."""
        if self._is_weight(parameter):
            self._wholes.add(self._name(parameter))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and self._is_weight(leaf)]
        if not given:
            return result
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        changes = changes_arguments(func) and isinstance(args[0], Tensor) and self._is_weight(args[0])
        if changes:
            self._wholes.update(self._name(tensor) for tensor in given)
        elif not made or not all(self._is_weight(tensor) for tensor in made):
            for tensor in given:
                self._note(tensor)
        return result

    def _note(self, view: Tensor) -> None:
        if view.numel() == 0:
            return
        name = self._name(view)
        whole = self._tensors[name]
        start = (view.data_ptr() - whole.data_ptr()) // whole.itemsize
        # the order of a view's elements does not matter, nor how often it has them
        sizes = sorted(
            ((step, size) for size, step in zip(view.shape, view.stride(), strict=True) if step), reverse=True
        )
        found = None
        if view.dtype == whole.dtype:
            found = rectangle_of([size for _, size in sizes], [step for step, _ in sizes], start, whole.shape)
        if found is None or found.common(Rectangle.whole(whole.shape)) != found:
            self._wholes.add(name)
        else:
            self._parts[name].add(found)

    def _name(self, view: Tensor) -> str:
        places = self._places[_memory(view)]
        return places[max(0, bisect_right(places, view.data_ptr(), key=lambda place: place[0]) - 1)][1]

    def _is_weight(self, tensor: Tensor) -> bool:
        return tensor.device.type != "meta" and tensor.numel() > 0 and _memory(tensor) in self._places


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
