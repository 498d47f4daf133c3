"""Distributed checkpoints: directories that all ranks write, that appear when complete and load into any layout.

On disk::

    <name>.ckpt/
      manifest.json   written last: what this directory is, its layout and versions, each file's size and checksum
      sharded/        weights and optimizer, Megatron's `dist_checkpointing` format
      trainer.pt      Lightning's part: loops (data cursor), callbacks, learning-rate schedulers, hyper-parameters
      rng/<rank>.pt   random-number states of one rank (torch, numpy, python, Megatron's tracker)
      hf/             of modules: the Hugging Face model without its weights, which a conversion needs
"""

import pickle
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed as dist

from lightning_megatron_rl.checkpoints.directories import UnfinishedDirectory, share_files
from lightning_megatron_rl.checkpoints.manifest import (
    MANIFEST_FILE,
    DamagedCheckpointError,
    FileRecord,
    HashedFile,
    check_files,
    is_checkpoint,
    previous_checkpoints,
    read_manifest,
    record_file,
    write_manifest,
)
from lightning_megatron_rl.parallel.distributed import run_and_finish, run_on_all_ranks, run_on_rank_zero
from lightning_megatron_rl.utilities.files import free_bytes, fsync
from lightning_megatron_rl.utilities.notices import tell_loss

if TYPE_CHECKING:
    from lightning_megatron_rl.checkpoints.shards import SavedShards, StagedShards, WrittenShards

EXTRA_STATE = "_extra_state"  # end of the names under which Transformer Engine keeps more than parameters
SHARDED = "sharded"
_REFUSALS = (pickle.PicklingError, AttributeError, TypeError)  # of pickle, for what it cannot write
_TRAINER_FILE = "trainer.pt"
_RNG = "rng"
_SMALL_FILES = 1 << 20  # bytes that a checkpoint takes beside its tensors, at least


def content_metadata() -> dict[str, Any]:
    """Return the options of Megatron's sharded state dicts: optimizer state that reshards to any layout."""
    from megatron.core import parallel_state

    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


class PendingCheckpoint:
    """A snapshot of a checkpoint's content, to be written now or later; made by all ranks together.

    Args:
        path: Where it shall stand; one that is there already is replaced when this one is complete.
        sharded: Megatron's sharded state dict of weights and optimizer; or the path of a checkpoint of this moment,
            which is complete when this one is written, and whose shards are shared.
        trainer_state: The rest of Lightning's checkpoint; rank 0's is written.
        description: Layout, world size, step and more, for the manifest.
        later: Training goes on before `write`: take copies.
        beside: Small files to write as well (rank 0's), by their path in the checkpoint.
        stage: Plans what is written of `sharded` into a directory; by default its tensors as they are.

    Raises:
        OSError: The directory cannot be written, or has too little room, on every rank.
        ValueError: What is at `path` is no checkpoint, or part of `trainer_state` cannot be pickled, on every rank.
    """

    def __init__(
        self,
        path: Path,
        sharded: dict[str, Any] | Path,
        trainer_state: dict[str, Any],
        description: dict[str, Any],
        *,
        later: bool,
        beside: Mapping[str, bytes] = MappingProxyType({}),
        stage: "Callable[[dict[str, Any], Path], StagedShards] | None" = None,
    ) -> None:
        self.path, self.description, self._beside = path, description, dict(beside)
        self._started = time.perf_counter()
        self._directory: UnfinishedDirectory | None = None  # rank 0 has it
        self._source = sharded if isinstance(sharded, Path) else None
        self._staged: StagedShards | None = None

        def prepare() -> Path:
            _check_replaceable(path, self._beside)
            with _writing(path):
                # names that begin with "last" are not counted up, and are looked for when a run resumes
                self._directory = UnfinishedDirectory(path, reserve=later and not path.name.startswith("last"))
                for part in (SHARDED, _RNG):
                    (self._directory.path / part).mkdir()
                return self._directory.path

        with self._leaving_nothing():
            self._partial = run_on_rank_zero(prepare)
            if isinstance(sharded, dict):
                self._staged = (stage or partial(_stage, copy=later))(sharded, self._partial / SHARDED)
            self._check_room(run_on_all_ranks(partial(self._pack, trainer_state)))

    def _pack(self, trainer_state: dict[str, Any]) -> int:
        """Keep the states of this moment as bytes; return how many bytes this rank will write."""
        first = dist.get_rank() == 0
        self._rng_state = _serialized(rng_state())
        self._trainer_state = _serialized(trainer_state) if first else b""
        own = sum(len(content) for content in self._beside.values()) if first else 0
        own += self._staged.num_bytes if self._staged is not None else 0
        return own + len(self._rng_state) + len(self._trainer_state)

    def _check_room(self, sizes: list[int]) -> None:
        needed = sum(sizes) + _SMALL_FILES

        def check() -> None:
            free = free_bytes(self.path.parent)
            if needed > free:
                raise OSError(
                    f"not enough room for the checkpoint {self.path}: {len(sizes)} rank(s) have {needed:,} bytes to"
                    f" write, {self.path.parent} has {free:,} bytes free, {needed - free:,} too few. Free them, choose"
                    " another ModelCheckpoint(dirpath=...), or keep fewer checkpoints (save_top_k) or only weights"
                    " (save_weights_only=True). Nothing was written."
                )

        run_on_rank_zero(check)

    @property
    def age_s(self) -> float:
        """Seconds since the snapshot."""
        return time.perf_counter() - self._started

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write everything and give the directory its name; a collective.

        Args:
            group: All ranks; one that no other thread uses, if this is not the main thread.

        Raises:
            OSError: A file cannot be written, on every rank. What stood under the name before still does.
        """
        with self._leaving_nothing():
            run_and_finish(self._write_own, self._publish, group)

    def _write_own(self) -> "tuple[WrittenShards | None, dict[str, FileRecord]]":
        with _writing(self.path):
            shards = self._staged.write() if self._staged is not None else None
            name = f"{_RNG}/{dist.get_rank()}.pt"
            return shards, {name: _write(self._partial / name, self._rng_state)}

    def _publish(self, written: "list[tuple[WrittenShards | None, dict[str, FileRecord]]]") -> None:
        assert self._directory is not None
        with _writing(self.path):
            files = {name: record for _, own in written for name, record in own.items()}
            for name, content in {**self._beside, _TRAINER_FILE: self._trainer_state}.items():
                (self._partial / name).parent.mkdir(parents=True, exist_ok=True)
                files[name] = _write(self._partial / name, content)
            files.update({f"{SHARDED}/{name}": record for name, record in self._sharded_files(written).items()})
            # whatever else was put there, such as by a subclass of the strategy
            others = (entry for entry in self._partial.rglob("*") if entry.is_file())
            names = [str(entry.relative_to(self._partial)) for entry in others]
            for name in names:
                if name not in files:
                    fsync(self._partial / name)
                    files[name] = record_file(self._partial / name)
            write_manifest(self._partial, self.description, files)
            self._directory.publish()

    def _sharded_files(
        self, written: "list[tuple[WrittenShards | None, dict[str, FileRecord]]]"
    ) -> dict[str, FileRecord]:
        if self._staged is not None:
            return self._staged.finish_all([shards for shards, _ in written if shards is not None])
        assert self._source is not None
        share_files(self._source / SHARDED, self._partial / SHARDED)
        files = read_manifest(self._source)["files"]
        prefix = f"{SHARDED}/"
        return {
            name.removeprefix(prefix): FileRecord(**record) for name, record in files.items() if name.startswith(prefix)
        }

    def abandon(self) -> None:
        """Remove it."""
        if self._directory is not None:
            self._directory.abandon()

    @contextmanager
    def _leaving_nothing(self) -> Iterator[None]:
        """Remove what was written if the body fails, which it does on every rank."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise


def _check_replaceable(path: Path, beside: Mapping[str, bytes]) -> None:
    """Refuse to write over a directory of the user's: what a checkpoint takes the place of is deleted.

    A checkpoint that has lost its manifest is no such directory.
    """
    if path.is_symlink() or not path.is_dir() or is_checkpoint(path):
        return
    names = sorted(entry.name for entry in path.iterdir())
    parts = {SHARDED, _TRAINER_FILE, _RNG, *(file.partition("/")[0] for file in beside)}
    was_one = SHARDED in names and set(names) <= parts
    if names and not was_one:
        raise ValueError(
            f"cannot save a checkpoint as {path}: there is a directory with {len(names)} entries"
            f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}) that is no checkpoint, for it has no"
            f" {MANIFEST_FILE}. It would be deleted. Give a name that is free, such as {path / 'step=1.ckpt'}, or move"
            " it away."
        )


def _stage(sharded: dict[str, Any], directory: Path, *, copy: bool) -> "StagedShards":
    from lightning_megatron_rl.checkpoints.shards import stage

    return stage(sharded, directory, content_metadata(), copy=copy)


def _serialized(state: dict[str, Any]) -> bytes:
    try:
        return _pickled(state)
    except _REFUSALS as error:
        raise ValueError(
            f"the run's state cannot be written to a checkpoint: {_unpicklable(state)} ({error}). Leave it out of the"
            " state_dict() or on_save_checkpoint() that gave it, or give it as plain data: numbers, strings, tensors,"
            " lists and dicts of them."
        ) from error


def _pickled(value: Any) -> bytes:
    stream = BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _unpicklable(value: Any, place: str = "") -> str:
    """Return the keys that lead to what cannot be pickled, and its type."""
    for key, part in value.items() if isinstance(value, dict) else ():
        try:
            _pickled(part)
        except _REFUSALS:
            return _unpicklable(part, f"{place}[{key!r}]")
    return f"{place} is of type {type(value).__name__}, which pickle refuses"


def _write(file: Path, content: bytes) -> FileRecord:
    with HashedFile(file) as stream:
        stream.write(content)
    return stream.record


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Name the checkpoint in the error of a file of it that cannot be written."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        raise OSError(
            f"rank {dist.get_rank()} cannot write the checkpoint {path}: {error}. Choose a writable"
            " ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...) with enough room. A checkpoint that stood"
            " under this name before is untouched."
        ) from error


def open_checkpoint(
    path: Path,
    *,
    verify: bool,
    fall_back: bool = False,
    suits: Callable[[dict[str, Any]], bool] = lambda manifest: True,
) -> tuple[Path, dict[str, Any]]:
    """Check a checkpoint's files, shared among the ranks, and return its path and manifest; a collective.

    Args:
        path: The checkpoint.
        verify: Compare checksums, not only sizes.
        fall_back: If it is damaged or incomplete, take the latest undamaged one beside it that is not of a later step,
            and warn.
        suits: Whether this run can use one with such a manifest; asked of those beside it.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: `path` is not a checkpoint, or of a newer format, or damaged.
    """
    damage = _find_damage(path, verify, incomplete=fall_back)
    if damage is None:
        return path, read_manifest(path)
    if fall_back:
        others = run_on_rank_zero(lambda: [it for it in previous_checkpoints(path) if suits(read_manifest(it))])
        for other in others:
            if _find_damage(other, verify) is None:
                if dist.get_rank() == 0:
                    tell_loss(f"{damage} It was not loaded: {other} takes its place.")
                return other, read_manifest(other)
        damage += f" There is no other undamaged checkpoint in {path.parent} from which this run could go on."
    raise DamagedCheckpointError(damage)


def _find_damage(path: Path, verify: bool, *, incomplete: bool = False) -> str | None:
    """What is wrong with a checkpoint's files, the same on every rank; None if nothing is.

    Args:
        path: The checkpoint.
        verify: Compare checksums, not only sizes.
        incomplete: Whether it may be a directory without a manifest, which is an error otherwise.
    """

    def check() -> str | None:
        if incomplete and path.is_dir() and not is_checkpoint(path):
            return f"checkpoint {path} was never finished, or is none: {path / MANIFEST_FILE} is missing."
        try:
            manifest = read_manifest(path)
            check_files(path, manifest, verify=verify, rank=dist.get_rank(), world_size=dist.get_world_size())
        except DamagedCheckpointError as error:
            return str(error)
        return None

    return next((damage for damage in run_on_all_ranks(check) if damage is not None), None)


def load_sharded(path: Path, sharded: dict[str, Any]) -> dict[str, Any]:
    """Load `sharded` (this layout's sharded state dict) from the checkpoint; returns it filled.

    Raises:
        ValueError: The checkpoint is of another model (missing or extra parameters, or other shapes), or lacks state
            of the optimizer.
    """
    from lightning_megatron_rl.checkpoints.same_model import check_same_model, check_same_optimizer
    from lightning_megatron_rl.checkpoints.shards import SavedShards, check_extra_state

    saved = _on_all_ranks(lambda: SavedShards(path / SHARDED))
    check_same_model(path, saved, sharded, read_manifest(path)["layout"]["tensor_model_parallel_size"])
    check_same_optimizer(path, saved, sharded)

    def load() -> dict[str, Any]:
        loaded = saved.load(_without_missing_extras(saved, sharded))
        states = [state for state in loaded.values() if isinstance(state, dict)]
        for name, value in ((str(name), value) for state in states for name, value in state.items()):
            if name.endswith(EXTRA_STATE):
                check_extra_state(name, value)
        return loaded

    return _on_all_ranks(load)


def load_trainer_state(path: Path, weights_only: bool) -> dict[str, Any]:
    """Load Lightning's part of the checkpoint; a collective.

    Raises:
        ValueError: It holds objects that are not plain data while `weights_only` is on.
    """
    file = path / _TRAINER_FILE
    if not weights_only:
        return torch.load(file, map_location="cpu", weights_only=False)
    remedy = " If you trust it, load it with Trainer.fit(..., weights_only=False)."

    def load() -> dict[str, Any]:
        state = _load_plain(file, remedy)
        _check_kept_checkpoints(file, state)
        return state

    return _on_all_ranks(load)


def _check_kept_checkpoints(file: Path, state: dict[str, Any]) -> None:
    """Refuse a ModelCheckpoint's state that names checkpoints outside its directory: it deletes what it names."""
    for name, callback in state.get("callbacks", {}).items():
        if not isinstance(callback, dict) or not callback.get("dirpath"):
            continue
        directory = Path(str(callback["dirpath"]))
        # not the best one's, which is only read, and may be in the directory of an earlier run
        named = [callback.get("last_model_path"), callback.get("kth_best_model_path")]
        for path in filter(None, [*named, *(callback.get("best_k_models") or {})]):
            # the directory itself may begin with "..": loggers and default_root_dir leave it as it was given
            if not Path(path).is_relative_to(directory) or ".." in Path(path).relative_to(directory).parts:
                raise ValueError(
                    f"{file}: the state of {str(name).partition('{')[0]} names {path} as one of its checkpoints, which"
                    f" is outside its directory {directory}. Nothing was loaded; take another checkpoint."
                )


def _on_all_ranks[T](function: Callable[[], T]) -> T:
    """Call `function` on every rank; if it failed on any, every rank raises the lowest such rank's error."""
    results: list[T] = []
    run_on_all_ranks(lambda: results.append(function()))
    return results[0]


def _load_plain(file: Path, remedy: str = "") -> dict[str, Any]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{file} holds objects that are not plain data, or is damaged: {error}.{remedy}") from error


def rng_state() -> dict[str, Any]:
    """Return the states of every random-number generator that training uses on this rank."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "python": random.getstate(),
        "megatron": dict(get_cuda_rng_tracker().get_states()),
    }


def load_rng_state(path: Path) -> dict[str, Any]:
    """Load this rank's `rng_state` from a checkpoint of as many ranks; a collective.

    Raises:
        ValueError: It is not plain data.
    """
    return _on_all_ranks(lambda: _load_plain(path / _RNG / f"{dist.get_rank()}.pt"))


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the generators' states that `rng_state` returned."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    random.setstate(state["python"])
    get_cuda_rng_tracker().set_states(state["megatron"])


def _without_missing_extras(saved: "SavedShards", sharded: dict[str, Any]) -> dict[str, Any]:
    """Leave out the extra state of Transformer Engine's layers (fp8 scales) where torch layers wrote the checkpoint."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    def is_there(key: Any, value: Any) -> bool:
        extra = isinstance(value, ShardedObject) and str(key).endswith(EXTRA_STATE)
        return not extra or value.unique_key in saved.objects

    return {
        part: {key: value for key, value in state.items() if is_there(key, value)} if isinstance(state, dict) else state
        for part, state in sharded.items()
    }
