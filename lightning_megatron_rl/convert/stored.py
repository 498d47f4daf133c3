"""Tensors of a distributed checkpoint, read one at a time, whatever layout wrote it."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_megatron_rl.checkpoints.shards import SavedShards
from lightning_megatron_rl.convert.skeleton import Piece, Skeleton
from lightning_megatron_rl.utilities.finite import describe_nonfinite, nonfinite_names, not_finite


class StoredTensors:
    """What Megatron's `torch_dist` format, torch's distributed checkpoint, holds in a directory.

    Args:
        directory: With .metadata and *.distcp.

    Raises:
        ValueError: Its index holds anything but data.

    Example:
        ``StoredTensors(path / "sharded").shapes["decoder.final_layernorm.weight"] == (1024,)``
    """

    def __init__(self, directory: Path) -> None:
        self._reader = SavedShards(directory).reader
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors: dict[str, TensorStorageMetadata] = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
        self._by_number: dict[tuple[str, int], dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors: layers and experts are stacked."""
        return {key: tuple(tensor.size) for key, tensor in self._tensors.items()}

    def dtype(self, key: str) -> torch.dtype:
        """Return the precision of a tensor."""
        return self._tensors[key].properties.dtype

    def read(self, parameter: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """Return a whole parameter, in its stored precision.

        Args:
            parameter: Whose shape it has.
            pieces: Its parts.

        Raises:
            ValueError: A part of it is not in the checkpoint, or a number of it is not finite.
        """
        whole = torch.empty(parameter.shape, dtype=self.dtype(pieces[0].key))
        targets = {(piece.key, piece.offsets): piece.of(whole) for piece in pieces}
        items = []
        for piece in pieces:
            wanted = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
            stored = self._tensors[piece.key]
            near = TensorStorageMetadata(stored.properties, stored.size, self._chunks_at(piece))
            found = create_read_items_for_chunk_list(piece.key, near, [wanted])
            if sum(item.lengths.numel() for item in found) != torch.Size(piece.sizes).numel():
                raise ValueError(
                    f"the checkpoint does not hold all of {piece.key} at {piece.offsets} + {piece.sizes}: a shard is"
                    " missing"
                )
            items += found
        self._reader.read_data(LoadPlan(items), _Into(targets))
        if nonfinite_names([("", whole)]):
            keys = [f"{key} at {offsets} has {describe_nonfinite(part)}" for (key, offsets), part in targets.items()]
            raise ValueError(not_finite(keys))
        return whole

    def _chunks_at(self, piece: Piece) -> list[ChunkStorageMetadata]:
        """The stored parts of a piece's layer and expert: models have ten thousands of them under one key."""
        place = (piece.key, piece.numbered)
        if place not in self._by_number:
            by_number: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
            for chunk in self._tensors[piece.key].chunks:
                by_number.setdefault(tuple(chunk.offsets[: piece.numbered]), []).append(chunk)
            self._by_number[place] = by_number
        return self._by_number[place].get(piece.offsets[: piece.numbered], [])


class _Into(DefaultLoadPlanner):
    """Says where to put what is read."""

    def __init__(self, targets: dict[tuple[str, tuple[int, ...]], Tensor]) -> None:
        super().__init__()
        self._targets = targets

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the part of a parameter that is read."""
        assert index.offset is not None
        return self._targets[index.fqn, tuple(index.offset)]


class StoredTasks(Sequence[Any]):
    """Megatron-Bridge's conversion tasks with the weights that a checkpoint has, each read when it is its turn."""

    def __init__(self, skeleton: Skeleton, stored: StoredTensors) -> None:
        self._skeleton, self._stored = skeleton, stored
        self._of_base = {task.global_param_name: task for task in skeleton.weights.tasks}

    def __len__(self) -> int:
        return len(self._skeleton.tasks)

    def __getitem__(self, index: Any) -> Any:
        return self._filled(self._skeleton.tasks[index])

    def __iter__(self) -> Iterator[Any]:
        return map(self._filled, self._skeleton.tasks)

    def _filled(self, task: Any) -> Any:
        return dataclasses.replace(task, param_weight=self.weight(task))

    def weight(self, task: Any) -> Tensor:
        """Return a task's parameter: the checkpoint's, or that of the model which its adapters are on."""
        pieces = self._skeleton.pieces(task.param_weight)
        if pieces:
            return self._stored.read(task.param_weight, pieces)
        return self._skeleton.weights.read(self._of_base[task.global_param_name])
