"""Distributed checkpoints: a directory written by all ranks, complete or not there at all, readable in any layout.

On disk::

    <name>.ckpt/
      layout.json     written last: what this directory is, its layout and versions
      sharded/        weights and optimizer, Megatron's `dist_checkpointing` format
      trainer.pt      Lightning's part: loops (data cursor), callbacks, learning-rate schedulers, hyper-parameters
      rng/<rank>.pt   random-number states of one rank (torch, numpy, python, Megatron's tracker)
      hf/             of modules: the Hugging Face model without its weights, which a conversion needs
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from lightning_megatron_rl.strategy.distributed import run_on_all_ranks, run_on_rank_zero

EXTRA_STATE = "_extra_state"  # end of the names under which Transformer Engine keeps more than parameters
FORMAT_VERSION = 1
LAYOUT_FILE = "layout.json"
_TRAINER_FILE = "trainer.pt"
SHARDED = "sharded"
_RNG = "rng"


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


def save(
    path: Path,
    sharded: dict[str, Any],
    trainer_state: dict[str, Any],
    layout: dict[str, Any],
    beside: Mapping[str, Callable[[Path], None]] = MappingProxyType({}),
    sharded_strategy: Any | None = None,
) -> None:
    """Write a checkpoint directory from all ranks; it appears under its name only when it is complete.

    Args:
        path: Where it shall stand; one that is there already is replaced.
        sharded: Megatron's sharded state dict of weights and optimizer.
        trainer_state: The rest of Lightning's checkpoint; rank 0's is written.
        layout: Description of the run's layout, stored as JSON.
        beside: Writes a directory of small files (rank 0), by its name in the checkpoint.
        sharded_strategy: How Megatron writes `sharded`; by default its own way.

    Raises:
        OSError: The directory cannot be written, on every rank.
    """
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException

    partial = path.with_name(f".{path.name}.incomplete")

    def prepare() -> None:
        with _writing(path):
            shutil.rmtree(partial, ignore_errors=True)
            for part in (SHARDED, _RNG):
                (partial / part).mkdir(parents=True)

    def write_rng_state() -> None:
        with _writing(path):
            torch.save(rng_state(), partial / _RNG / f"{dist.get_rank()}.pt")

    run_on_rank_zero(prepare)
    metadata = {key: value for key, value in content_metadata().items() if key != "dp_cp_group"}
    try:
        dist_checkpointing.save(
            sharded, str(partial / SHARDED), sharded_strategy=sharded_strategy, content_metadata=metadata
        )
    except CheckpointException as failed:  # no `Exception`; on every rank, but only the first knows whose error it was
        failures = failed.failures

        def tell() -> None:
            rank, (error, _) = min(failures.items(), key=lambda item: item[0])
            raise _cannot_write(path, rank, error)

        run_on_rank_zero(tell)
    run_on_all_ranks(write_rng_state)

    def publish() -> None:
        description = {"format_version": FORMAT_VERSION, **layout, "versions": _versions()}
        with _writing(path):
            torch.save(trainer_state, partial / _TRAINER_FILE)
            for name, write in beside.items():
                write(partial / name)
            (partial / LAYOUT_FILE).write_text(json.dumps(description, indent=2) + "\n")
            _fsync_tree(partial)
        replaced = path.with_name(f".{path.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            path.rename(replaced)
        partial.rename(path)
        _fsync(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    run_on_rank_zero(publish)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Name the checkpoint in the error of a file of it that cannot be written."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        raise _cannot_write(path, dist.get_rank(), error) from error


def _cannot_write(path: Path, rank: int, error: BaseException) -> OSError:
    return OSError(
        f"rank {rank} cannot write the checkpoint {path}: {error}. Choose a writable ModelCheckpoint(dirpath=...) or"
        " Trainer(default_root_dir=...) with enough room. A checkpoint that stood under this name before is untouched."
    )


def read_layout(path: Path) -> dict[str, Any]:
    """Return the description of the checkpoint at `path`.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: `path` is not a (complete) checkpoint, or one of a newer format.
    """
    if not path.exists():
        raise FileNotFoundError(f"checkpoint {path} does not exist.")
    if not (path / LAYOUT_FILE).is_file():
        raise ValueError(
            f"{path} is not a checkpoint of this strategy: it has no {LAYOUT_FILE}. A checkpoint is the directory that"
            " ModelCheckpoint wrote; a Hugging Face model directory goes into the module's `model` argument."
        )
    layout = json.loads((path / LAYOUT_FILE).read_text())
    if layout["format_version"] > FORMAT_VERSION:
        raise ValueError(
            f"{path} has checkpoint format {layout['format_version']}, this version reads up to {FORMAT_VERSION}:"
            " upgrade lightning-megatron-rl."
        )
    return layout


def load_sharded(path: Path, sharded: dict[str, Any]) -> dict[str, Any]:
    """Load `sharded` (this layout's sharded state dict) from the checkpoint; returns it filled.

    Raises:
        ValueError: The checkpoint is of another model: missing or extra parameters, or other shapes.
    """
    from megatron.core import dist_checkpointing

    _check_same_model(path, sharded)
    return dist_checkpointing.load(_without_missing_extras(path, sharded), str(path / SHARDED))


def load_trainer_state(path: Path, weights_only: bool) -> dict[str, Any]:
    """Load Lightning's part of the checkpoint.

    Raises:
        ValueError: It holds objects that are not plain data while `weights_only` is on.
    """
    try:
        return torch.load(path / _TRAINER_FILE, map_location="cpu", weights_only=weights_only)
    except Exception as error:
        if not weights_only:
            raise
        raise ValueError(
            f"{path / _TRAINER_FILE} holds objects that are not plain data, or is damaged: {error}. If you trust it,"
            " load it with Trainer.fit(..., weights_only=False)."
        ) from error


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


def restore_rng_state(path: Path) -> bool:
    """Restore this rank's generators from the checkpoint; False if it was saved by fewer ranks."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    file = path / _RNG / f"{dist.get_rank()}.pt"
    if not file.is_file():
        return False
    state = torch.load(file, map_location="cpu", weights_only=True)
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    random.setstate(state["python"])
    get_cuda_rng_tracker().set_states(state["megatron"])
    return True


def remove(path: Path) -> None:
    """Delete a checkpoint directory, and nothing that is not one.

    Raises:
        ValueError: `path` is a directory without a layout file.
    """
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        if not (path / LAYOUT_FILE).is_file():
            raise ValueError(f"refusing to delete {path}: it has no {LAYOUT_FILE}, so it is not a checkpoint.")
        shutil.rmtree(path)


def _check_same_model(path: Path, sharded: dict[str, Any]) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    wanted: dict[str, tuple[int, ...]] = {}
    for part, state in sharded.items():
        if not part.startswith("optimizer"):
            for tensor in nested_values(state):
                if isinstance(tensor, ShardedTensor) and not tensor.allow_shape_mismatch:
                    wanted[tensor.key] = tuple(tensor.global_shape)
    everywhere: list[dict[str, tuple[int, ...]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, wanted)
    for other in everywhere:
        wanted.update(other)
    saved = {
        key: tuple(tensor.global_shape)
        for key, tensor in dist_checkpointing.load_tensors_metadata(str(path / SHARDED)).items()
    }
    missing = [key for key in wanted if key not in saved]
    shapes = [f"{key} {saved[key]} != {wanted[key]}" for key in wanted if key in saved and saved[key] != wanted[key]]
    if missing or shapes:
        raise ValueError(
            f"checkpoint {path} is of another model: {len(missing)} of {len(wanted)} parameters are missing"
            f"{_first(missing)}, {len(shapes)} have another shape (checkpoint != model){_first(shapes)}."
            " Use the checkpoint with the model it was trained from."
        )


def _without_missing_extras(path: Path, sharded: dict[str, Any]) -> dict[str, Any]:
    """Leave out the extra state of Transformer Engine's layers (fp8 scales) where torch layers wrote the checkpoint."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    saved = dist_checkpointing.serialization.load_sharded_metadata(str(path / SHARDED))

    def is_there(key: Any, value: Any) -> bool:
        extra = isinstance(value, ShardedObject) and str(key).endswith(EXTRA_STATE)
        return not extra or value.unique_key in saved

    return {
        part: {key: value for key, value in state.items() if is_there(key, value)} if isinstance(state, dict) else state
        for part, state in sharded.items()
    }


def _first(items: list[str], count: int = 3) -> str:
    return f" ({', '.join(items[:count])}{', ...' if len(items) > count else ''})" if items else ""


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "lightning", "megatron-core", "megatron-bridge")}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_tree(root: Path) -> None:
    paths: Iterable[Path] = root.rglob("*")
    for path in [*paths, root]:
        _fsync(path)
