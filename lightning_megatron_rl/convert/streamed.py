"""Writing a distributed checkpoint whose tensors are made one at a time."""

from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import WriteItem
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.storage import WriteResult

from lightning_megatron_rl.checkpoints.format import content_metadata
from lightning_megatron_rl.checkpoints.manifest import FileRecord, HashedFile
from lightning_megatron_rl.checkpoints.shards import StagedShards, WrittenShards, plan_save, written_at

FILE_SIZE = 4_000_000_000  # bytes of a file, but for its last tensor

Staged = tuple[WriteItem, Tensor | BytesIO]


class StreamedShards(StagedShards):
    """What is to be written of a model on the meta device: a tensor is made when it is its turn.

    Args:
        directory: Where to write; it must be there, and empty.
        make: Returns the numbers of a part of a parameter, given as it is on the meta device.
    """

    def __init__(self, directory: Path, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__(directory, copy=False)
        self._make = make

    def write(self) -> WrittenShards:
        """Write files of about `FILE_SIZE`, key by key: experts of one layer come one after the other.

        Raises:
            OSError: A file cannot be written.
            ValueError: A parameter cannot be made.
        """
        results: list[WriteResult] = []
        files: dict[str, FileRecord] = {}
        staged = sorted(self._items, key=lambda pair: pair[0].index.fqn)
        for number, pairs in enumerate(_by_file(staged)):
            name = f"__0_{number}{DEFAULT_SUFFIX}"
            with HashedFile(self.directory / name) as file:
                for item, data in pairs:
                    start = file.tell()
                    if isinstance(data, BytesIO):
                        file.write(data.getbuffer())
                    else:
                        # a copy: of a view, torch would save all that it is a view of
                        torch.save(self._make(data).clone(memory_format=torch.contiguous_format), file)  # type: ignore[arg-type]
                    length = file.tell() - start
                    results.append(written_at(item, name, start, length))
            files[name] = file.record
        return WrittenShards(results, files)


def stage_streamed(sharded: dict[str, Any], directory: Path, *, make: Callable[[Tensor], Tensor]) -> StagedShards:
    """Plan a save of a sharded state dict on the meta device; see `StreamedShards`."""
    staged = StreamedShards(directory, make)
    plan_save(sharded, staged, content_metadata())
    return staged


def _by_file(staged: Iterable[Staged]) -> Iterator[list[Staged]]:
    """Share out what is written over files of about `FILE_SIZE` bytes."""
    file: list[Staged] = []
    size = 0
    for item, data in staged:
        file.append((item, data))
        size += data.nbytes if isinstance(data, Tensor) else data.getbuffer().nbytes
        if size >= FILE_SIZE:
            yield file
            file, size = [], 0
    if file:
        yield file
