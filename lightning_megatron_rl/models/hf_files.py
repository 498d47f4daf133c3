"""Files of Hugging Face checkpoints: finding or downloading one, and writing one that appears when it is complete."""

import copy
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
DOWNLOADED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


def local_checkpoint(name_or_path: str) -> Path:
    """The directory of a checkpoint: a local one as it is, a hub name downloaded by one process of each node.

    Raises `ValueError` if the directory has no config.json or no safetensors weights, or the name cannot be downloaded.
    """
    path = Path(name_or_path).expanduser()
    if not path.is_dir():
        if path.exists() or path.is_absolute() or name_or_path.startswith((".", "~")) or name_or_path.count("/") != 1:
            raise ValueError(
                f"model {name_or_path!r} is neither a directory nor a hub name ('organisation/model'): check the path"
            )
        path = _download(name_or_path)
    if not (path / "config.json").is_file():
        raise ValueError(f"model directory {path} has no config.json: give the directory that `save_pretrained` wrote")
    if not any(path.glob("*.safetensors")):
        raise ValueError(
            f"model directory {path} has no *.safetensors weights: save the model again with "
            "`save_pretrained(..., safe_serialization=True)`"
        )
    return path


def _download(name: str) -> Path:
    """Fetch hub model `name`: local rank 0 of each node first, the others from its cache."""
    from huggingface_hub import snapshot_download

    first_of_node = int(os.environ.get("LOCAL_RANK", "0")) == 0
    path = None
    error = None
    if first_of_node:
        try:
            path = snapshot_download(name, allow_patterns=DOWNLOADED)
        except Exception as exception:
            error = f"cannot download model {name!r}: {type(exception).__name__}: {exception}"
    raise_everywhere(error)
    return Path(path if path is not None else snapshot_download(name, local_files_only=True))


def raise_everywhere(error: str | None) -> None:
    """Raise `ValueError` on all ranks if any rank has an `error`; a barrier otherwise, so that none is left waiting."""
    errors = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    messages = [message for message in errors if message is not None]
    if messages:
        raise ValueError(messages[0])


def fingerprint(path: Path) -> str:
    """Return a hash of a checkpoint's tensors: names, types, shapes and the first 4 KiB of each.

    The same for every way of cutting the tensors into files; directory and other files do not matter.
    """
    entries = []
    for file in path.glob("*.safetensors"):
        with file.open("rb") as stream:
            header_size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(header_size))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                stream.seek(8 + header_size + start)
                content = hashlib.sha256(stream.read(min(end - start, 4096))).hexdigest()
                entries.append(f"{name} {entry['dtype']} {entry['shape']} {content}")
    return hashlib.sha256("\n".join(sorted(entries)).encode()).hexdigest()


class CheckpointWriter:
    """Writes a Hugging Face checkpoint tensor by tensor into a temporary directory and renames it at the end.

    At most one shard of `max_shard_size` bytes (or one tensor) is held in memory. Raises `ValueError` if `directory`
    exists and is not empty.
    """

    def __init__(self, directory: Path, max_shard_size: int) -> None:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ValueError(f"{directory} exists and is not empty: remove it or choose another directory")
        self.directory = directory
        self.max_shard_size = max_shard_size
        self.temporary = directory.parent / f".{directory.name}.{os.getpid()}.partial"
        self.temporary.mkdir(parents=True)
        self._shards: list[list[str]] = []  # names of the tensors in each
        self._pending: dict[str, Tensor] = {}
        self._pending_size = 0  # bytes
        self._total_size = 0  # bytes

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_size + size > self.max_shard_size:
            self._flush()
        # a copy of its own: tied tensors may share memory, which safetensors refuses
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_size += size
        self._total_size += size

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self._pending, self.temporary / f"shard-{len(self._shards)}", metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending = {}
        self._pending_size = 0

    def finish(self, source: Path, config: Any, dtype: torch.dtype) -> None:
        """Add config, tokenizer and generation config of `source`, and make the checkpoint appear."""
        self._flush()
        count = len(self._shards)
        weight_map = {}
        for index, names in enumerate(self._shards):
            file = "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            (self.temporary / f"shard-{index}").rename(self.temporary / file)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            listing = {"metadata": {"total_size": self._total_size}, "weight_map": weight_map}
            (self.temporary / "model.safetensors.index.json").write_text(json.dumps(listing, indent=2) + "\n")
        for original in source.iterdir():
            if original.is_file() and _belongs(original.name):
                shutil.copyfile(original, self.temporary / original.name)
        config = copy.deepcopy(config)
        config.dtype = dtype
        config.__dict__.pop("quantization_config", None)  # the weights are written as they are trained
        config.save_pretrained(self.temporary)
        if self.directory.exists():
            self.directory.rmdir()
        self.temporary.rename(self.directory)

    def abandon(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.temporary, ignore_errors=True)


def _belongs(name: str) -> bool:
    """Whether a file of the source checkpoint belongs to its copy: the tokenizer and settings, not weights or cards."""
    return not (
        name.endswith(WEIGHT_SUFFIXES)
        or name.endswith(".index.json")
        or name.startswith(".")
        or name in ("config.json", "README.md")
    )
