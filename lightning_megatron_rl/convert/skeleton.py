"""A Megatron model without its numbers, and where in a distributed checkpoint each parameter stands."""

import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_megatron_rl.checkpoints.format import content_metadata
from lightning_megatron_rl.models.hf.tensors import HFWeights
from lightning_megatron_rl.models.layers.lora import LoRASettings

if TYPE_CHECKING:
    from lightning_megatron_rl.models.hf.model import HFModel


@dataclass(frozen=True)
class Piece:
    """A part of a parameter (all of it, or the gate or what it gates) and its place in a tensor of a checkpoint."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    numbered: int  # first dimensions that count layers and experts, in which a piece is one
    resizable: bool  # the stored tensor may have more rows: a vocabulary padded for its layout
    global_shape: tuple[int, ...]
    start: int  # where the part begins in the parameter, in elements
    stride: tuple[int, ...]

    def fits(self, stored: tuple[int, ...]) -> bool:
        """Whether a stored tensor of this shape can hold the piece."""
        if not self.resizable:
            return stored == self.global_shape
        return stored[1:] == self.global_shape[1:] and stored[0] >= self.global_shape[0]

    def of(self, parameter: Tensor) -> Tensor:
        """Return the part of a whole parameter, in the shape that the checkpoint has for it."""
        return parameter.as_strided(self.sizes[self.numbered :], self.stride, self.start).view(self.sizes)


class Skeleton:
    """A model on the meta device, whose parameters are known by the places of their parts.

    Args:
        model: The Hugging Face side.
        dtype: Of the parameters.
        lora: Adapters on it; a checkpoint then holds those alone.
        prefix: Of its names in a checkpoint: that of a model saved beside the trained one.
    """

    def __init__(
        self, model: "HFModel", dtype: torch.dtype, *, lora: LoRASettings | None = None, prefix: str = ""
    ) -> None:
        self.model = model
        self.dtype = dtype
        with redirect_stdout(sys.stderr):  # Megatron-Bridge prints what it builds
            self.chunks: list[Any] = model.build_chunks(
                params_dtype=dtype,
                layer_backend="torch",
                device=torch.device("meta"),
                sequence_parallel=False,
                load_weights=False,
                lora=lora,
            )
        (chunk,) = self.chunks
        self.state: dict[str, Any] = chunk.sharded_state_dict(prefix=prefix, metadata=content_metadata())
        if lora is not None:
            trained = {prefix + name for name, parameter in chunk.named_parameters() if parameter.requires_grad}
            self.state = {name: tensor for name, tensor in self.state.items() if name in trained}
        self.tensors: dict[int, tuple[str, Tensor]] = {
            _storage(tensor): (name, tensor) for name, tensor in _persistent(chunk)
        }
        self._pieces: dict[int, list[Piece]] = {}
        for tensor in _sharded_tensors(self.state):
            self._pieces.setdefault(_storage(tensor.data), []).append(_piece(tensor))
        self.weights: HFWeights = model.open_weights(self.chunks)
        self.tasks: list[Any] = model.conversion_tasks(self.chunks)
        _stand_in(chunk)

    def pieces(self, parameter: Tensor) -> list[Piece]:
        """Return the parts of a parameter of the model, given as it was on the meta device."""
        return self._pieces.get(_storage(parameter), [])

    def owner(self, piece: Tensor) -> Tensor:
        """Return the parameter that a part, on the meta device, is a part of."""
        return self.tensors[_storage(piece)][1]

    @property
    def saved(self) -> Iterator[tuple[str, Tensor]]:
        """Names and parameters, on the meta device, of what a checkpoint holds."""
        for storage, pair in self.tensors.items():
            if storage in self._pieces:
                yield pair

    @property
    def bytes(self) -> int:
        """Size of all that a checkpoint holds of the model."""
        return sum(tensor.element_size() * tensor.numel() for tensor in (t.data for t in _sharded_tensors(self.state)))

    @property
    def unmapped(self) -> Iterator[tuple[str, Tensor]]:
        """Names and parameters that Megatron-Bridge does not convert: a value head, adapters."""
        mapped = {_storage(task.param_weight) for task in self.tasks if task.param_weight is not None}
        for name, tensor in self.saved:
            if _storage(tensor) not in mapped:
                yield name, tensor

    def put(self, name: str, value: Tensor) -> None:
        """Give a parameter that is not converted its numbers."""
        path, _, child = name.rpartition(".")
        self.chunks[0].get_submodule(path).register_parameter(child, nn.Parameter(value, requires_grad=False))


def _persistent(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers that are part of a model: the biases of routers."""
    yield from chunk.named_parameters()
    kept = chunk.state_dict(keep_vars=True)
    for name, buffer in chunk.named_buffers():
        if name in kept:
            yield name, buffer


def _sharded_tensors(state: dict[str, Any]) -> Iterator[Any]:
    """Megatron's sharded tensors of a state dict, with fused projections taken apart as checkpoints have them."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = dict(state)
    apply_factories(state)
    for value in nested_values(state):
        if isinstance(value, ShardedTensor):
            yield value


def _piece(tensor: Any) -> Piece:
    return Piece(
        key=tensor.key,
        offsets=tuple(tensor.global_offset),
        sizes=(1,) * tensor.prepend_axis_num + tuple(tensor.local_shape),
        numbered=tensor.prepend_axis_num,
        resizable=tensor.allow_shape_mismatch,
        global_shape=tuple(tensor.global_shape),
        start=tensor.data.storage_offset(),
        stride=tuple(tensor.data.stride()),
    )


def _storage(tensor: Tensor) -> int:
    """What a tensor has in common with its views, on the meta device too."""
    return StorageWeakRef(tensor.untyped_storage()).cdata


def _stand_in(chunk: nn.Module) -> None:
    """Put tensors of one number, as large as they claim to be, in the place of those on the meta device.

    Megatron-Bridge moves weights to the device of the parameter they are for.
    """
    for module in chunk.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if parameter.is_meta:
                number = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                module.register_parameter(name, nn.Parameter(number, requires_grad=False))
