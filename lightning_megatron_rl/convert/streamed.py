"""Writing a distributed checkpoint whose tensors are made one at a time, in Megatron's `torch_dist` format."""

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan, WriteItem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

FILE_SIZE = 4_000_000_000  # bytes of a file, but for its last tensor


class StreamedSave(TorchDistSaveShardedStrategy):
    """Megatron's way to save, for a state dict on the meta device.

    Args:
        make: Returns the numbers of a part of a parameter, given as it is on the meta device.

    Example:
        ``dist_checkpointing.save(state, path, sharded_strategy=StreamedSave(make))``
    """

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._make = make

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Write the files; called by `dist_checkpointing.save`, which has taken fused projections apart."""
        checkpoint.save(
            {}, storage_writer=_TensorByTensor(checkpoint_dir), planner=_Plan(sharded_state_dict, self._make)
        )


class _Plan(DefaultSavePlanner):
    """Everything in a sharded state dict, tensors without their numbers until these are written."""

    def __init__(self, state: Any, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._state, self._make = state, make
        self._values: dict[MetadataIndex, Any] = {}

    def create_local_plan(self) -> SavePlan:
        """List what is written, key by key."""
        items = []
        for value in nested_values(self._state):
            if isinstance(value, ShardedTensor):
                index = MetadataIndex(value.key, torch.Size(value.global_offset))
                sizes = torch.Size((1,) * value.prepend_axis_num + tuple(value.local_shape))
                data = TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(value.global_offset), sizes),
                    properties=TensorProperties(dtype=value.dtype),
                    size=torch.Size(value.global_shape),
                )
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            else:
                index = MetadataIndex(value.unique_key)
                items.append(WriteItem(index, WriteItemType.BYTE_IO))
            self._values[index] = value
        items.sort(key=lambda item: item.index.fqn)  # experts of one layer come one after the other
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return what is to be written, in memory of its own."""
        value = self._values[write_item.index]
        if isinstance(value, ShardedTensor):
            sizes = (1,) * value.prepend_axis_num + tuple(value.local_shape)
            return self._make(value.data).reshape(sizes).clone()
        stream = io.BytesIO()
        torch.save([value.data], stream)  # a list, as Megatron has it
        return stream


class _TensorByTensor(FileSystemWriter):
    """Forgets each tensor when it is written; torch's own writer keeps one of each key until the end of a file."""

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        results = []
        for number, items in enumerate(_by_file(plan.items)):
            name = f"{plan.storage_data.prefix}{number}.distcp"
            with (Path(self.path) / name).open("wb") as stream:
                for item in items:
                    start = stream.tell()
                    data = planner.resolve_data(item)
                    if isinstance(data, io.BytesIO):
                        stream.write(data.getbuffer())
                    else:
                        torch.save(data, stream)
                    del data
                    length = stream.tell() - start
                    results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
                stream.flush()
                os.fsync(stream.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _by_file(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """Share out what is written over files of about `FILE_SIZE` bytes."""
    file: list[WriteItem] = []
    size = 0
    for item in items:
        file.append(item)
        if item.tensor_data is not None and item.tensor_data.chunk is not None:
            size += item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        if size >= FILE_SIZE:
            yield file
            file, size = [], 0
    if file:
        yield file
