"""Weights and optimizer state as Megatron's `torch_dist` files: staged in one moment, written later, read as data.

Megatron plans who writes what. Copying, writing and reading are here, because its own writer needs helper processes,
and its reader unpickles whatever a file holds.
"""

import pickle
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import save
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.safe_globals import SafeUnpickler
from torch import Tensor
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from lightning_megatron_rl.checkpoints.manifest import FileRecord, HashedFile, record_file
from lightning_megatron_rl.utilities.files import fsync, inside

COMMON_STATE = "common_state"  # Megatron's name for what is neither a tensor nor an object of its own
METADATA_FILE = ".metadata"
_CONFIG_FILE = "metadata.json"
_BACKEND = "torch_dist"


@dataclass(frozen=True)
class WrittenShards:
    """One rank's output: where each item is, and the files."""

    items: list[WriteResult]
    files: dict[str, FileRecord]


class StagedShards(FileSystemWriterAsync):
    """This rank's part of a save, as planned.

    Args:
        directory: Where to write; it must be there, and empty.
        copy: Copy tensors to the host's memory now. Otherwise they are read when they are written: nothing may have
            changed them by then.
    """

    def __init__(self, directory: Path, *, copy: bool) -> None:
        super().__init__(str(directory), thread_count=1)
        self.directory = directory
        self.metadata: dcp_metadata.Metadata | None = None  # on rank 0: of all ranks
        self._copy = copy
        self._items: deque[tuple[WriteItem, Tensor | BytesIO]] = deque()

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Take what `plan` gives to this rank; the last thing that Megatron's planning calls."""
        for item in plan.items:
            data = planner.resolve_data(item)
            if isinstance(data, Tensor) and self._copy:
                data = _host_copy(data)
            self._items.append((item, data))
        _wait_for_copies()

    @property
    def num_bytes(self) -> int:
        """Bytes of the data that are still to be written, without a few hundred per tensor."""
        return sum(data.nbytes if isinstance(data, Tensor) else data.getbuffer().nbytes for _, data in self._items)

    def write(self) -> WrittenShards:
        """Write this rank's file and release each tensor behind it; needs no other rank and nothing of training.

        Raises:
            OSError: The file cannot be written.
            RuntimeError: Likewise, from torch.
        """
        if not self._items:
            return WrittenShards([], {})
        name = f"__{dist.get_rank()}_0{dcp_files.DEFAULT_SUFFIX}"
        results = []
        with HashedFile(self.directory / name) as file:
            while self._items:
                item, data = self._items.popleft()
                start = file.tell()
                if item.type == WriteItemType.BYTE_IO:
                    file.write(data.getbuffer())  # type: ignore[union-attr]
                else:
                    torch.save(data if self._copy else self._copied(data), file)  # type: ignore[arg-type]
                length = file.tell() - start
                results.append(written_at(item, name, start, length))
        return WrittenShards(results, {name: file.record})

    @staticmethod
    def _copied(tensor: Tensor) -> Tensor:
        copy = _host_copy(tensor)
        _wait_for_copies()
        return copy

    def finish_all(self, written: Sequence[WrittenShards]) -> dict[str, FileRecord]:
        """Write, on rank 0, where everything is, and return the files of all ranks."""
        assert self.metadata is not None
        self.finish(self.metadata, [shards.items for shards in written])
        save_config(CheckpointingConfig(_BACKEND), str(self.directory))
        fsync(self.directory / _CONFIG_FILE)
        files = {name: record for shards in written for name, record in shards.files.items()}
        return {**files, **{name: record_file(self.directory / name) for name in (METADATA_FILE, _CONFIG_FILE)}}


def written_at(item: WriteItem, file: str, start: int, length: int) -> WriteResult:
    """Return the index's entry of an item: its file, and the bytes in it."""
    return WriteResult(item.index, length, dcp_files._StorageInfo(file, start, length))


class _Staging(torch_dist.TorchDistSaveShardedStrategy):
    """Megatron's planning of a save, without its writing."""

    def __init__(self, staged: StagedShards) -> None:
        super().__init__(backend=_BACKEND)
        self._staged = staged

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> AsyncRequest:
        state, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        planner = torch_dist.MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        tensors = torch_dist.mcore_to_pyt_state_dict(state, is_loading=False)
        (_, self._staged.metadata, _), *_ = save_state_dict_async_plan(tensors, self._staged, None, 0, planner)
        return AsyncRequest(None, (), [])


def stage(sharded: dict[str, Any], directory: Path, content_metadata: dict[str, Any], *, copy: bool) -> StagedShards:
    """Plan a save over all ranks and take what this one has to write; a collective.

    What several data-parallel ranks hold is shared out among them.

    Args:
        sharded: Megatron's sharded state dict; it is used up.
        directory: Where `StagedShards.write` shall write.
        content_metadata: Options that the state dict was made with.
        copy: See `StagedShards`.
    """
    staged = StagedShards(directory, copy=copy)
    plan_save(sharded, staged, content_metadata)
    return staged


def plan_save(sharded: dict[str, Any], staged: StagedShards, content_metadata: dict[str, Any]) -> None:
    """Share out a sharded state dict over all ranks, and give `staged` what this one has to write; a collective."""
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(_Staging(staged), replicas)
    save(sharded, str(staged.directory), strategy, async_sharded_save=True, content_metadata=content_metadata)


class SavedShards:
    """The shards in a directory, opened for reading; what is in them is data and is never executed.

    Raises:
        ValueError: Its metadata hold anything but metadata.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.reader = _Reader(directory)
        metadata = self.reader.read_metadata()
        tensors = metadata.state_dict_metadata.items()
        self.shapes = {
            name: tuple(saved.size) for name, saved in tensors if isinstance(saved, dcp_metadata.TensorStorageMetadata)
        }
        self.objects = metadata.state_dict_metadata.keys() - self.shapes.keys()

    def load(self, sharded: dict[str, Any]) -> dict[str, Any]:
        """Return `sharded` (this layout's sharded state dict) filled, and what was saved unsharded beside it."""
        sharded, local, factories = load_preprocess(sharded)
        wanted, _ = extract_sharded_base(sharded)
        wanted[COMMON_STATE] = ShardedObject(COMMON_STATE, None, (1,), (0,))
        loaded = _Loading(self.reader).load(wanted, self.directory)
        common = loaded.pop(COMMON_STATE)
        merge(common, local)
        merge(common, loaded)
        return apply_factory_merges(common, factories)


class _Loading(torch_dist.TorchDistLoadShardedStrategy):
    """Megatron's way from saved tensors to a state dict, with a reader and a planner that execute nothing."""

    def __init__(self, reader: "_Reader") -> None:
        super().__init__()
        self._reader = reader

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> dict[str, Any]:
        state, mapping, names = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        tensors = torch_dist.mcore_to_pyt_state_dict(state, is_loading=True)
        every = [tensor for found in state.values() for tensor in found if isinstance(tensor, torch_dist.ShardedTensor)]
        planner = _Planner(
            shapes_validation_sharded_tensors=[tensor for tensor in every if not tensor.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={
                tensor.key: tensor for tensor in every if tensor.allow_shape_mismatch
            },
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch's own classes, and that ranks read each for itself
                dcp.load(tensors, storage_reader=self._reader, planner=planner, no_dist=True)
        except dcp.CheckpointException as failed:  # no `Exception`, and not what has happened
            raise next(error for error, _ in failed.failures.values()) from failed
        found = {key: torch_dist._unwrap_pyt_sharded_tensor(value) for key, value in tensors.items()}
        result = torch_dist._replace_sharded_keys_with_state_dict_keys(found, mapping, names)
        torch_dist._restore_dict_types(result, sharded_state_dict)
        return result


class _Planner(torch_dist.MCoreLoadPlanner):
    def load_bytes(self, read_item: Any, value: BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(f"{name} among the shards is not plain data: {error}") from error


class _Reader(dcp.FileSystemReader):
    """Reads the index of a directory once, and nothing but an index."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self._metadata: dcp_metadata.Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        if self._metadata is None:
            file = Path(self.path) / METADATA_FILE
            with file.open("rb") as stream:
                try:
                    self._metadata = _MetadataUnpickler(stream).load()
                except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError) as error:
                    raise ValueError(
                        f"{file} is no index of a distributed checkpoint: {error}. Nothing of it was executed; take"
                        " another checkpoint."
                    ) from error
            if not isinstance(self._metadata, dcp_metadata.Metadata):
                raise ValueError(f"{file} is no index of a distributed checkpoint: {type(self._metadata).__name__}.")
            for stored in (self._metadata.storage_data or {}).values():
                if not isinstance(stored, dcp_files._StorageInfo) or not isinstance(stored.relative_path, str):
                    raise ValueError(f"{file} is no index of a distributed checkpoint: it names {stored!r} as a file.")
                try:
                    inside(Path(self.path), stored.relative_path)
                except ValueError as error:
                    raise ValueError(
                        f"{file} names a file outside its directory: {error}. It was not opened."
                    ) from error
            self._metadata.storage_meta = dcp_metadata.StorageMeta(load_id=self.load_id)
        return self._metadata


_PLAIN_CLASSES: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        dcp_metadata.BytesStorageMetadata,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata.Metadata,
        dcp_metadata.MetadataIndex,
        dcp_metadata.StorageMeta,
        dcp_metadata.TensorProperties,
        dcp_metadata.TensorStorageMetadata,
        dcp_metadata._MEM_FORMAT_ENCODING,
        dcp_files._StorageInfo,
        torch.Size,
    )
}


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the records of torch's index, number types and layouts, and refuses to import anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN_CLASSES:
            return _PLAIN_CLASSES[module, name]
        if (module, name) == ("torch.serialization", "_get_layout"):  # how a tensor's layout is pickled: a look-up
            return torch.serialization._get_layout
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def check_extra_state(name: str, value: Any) -> None:
    """Refuse the extra state of a layer, which Transformer Engine will unpickle, if that would run anything.

    Megatron looks at what its grouped layers are given, and leaves the others to Transformer Engine.

    Raises:
        ValueError: It asks for more than tensors, numbers and a recipe.
    """
    if not isinstance(value, Tensor) or value.numel() == 0:
        return
    try:
        SafeUnpickler(BytesIO(value.detach().cpu().numpy().tobytes())).load()
    except Exception as error:
        raise ValueError(f"{name} among the shards is no state of an fp8 layer: {error}.") from error


def _host_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor, and no more of its storage, to the host; from a GPU into pinned memory, which may end later."""
    if tensor.is_cuda:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return copy.copy_(tensor.detach(), non_blocking=True)
    # not `.to("cpu")`: what is there already would not be copied, and the next step would change what is written
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _wait_for_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
