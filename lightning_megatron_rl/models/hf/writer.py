"""Writing Hugging Face checkpoints: safetensors tensor by tensor, in a directory that appears when it is complete."""

import contextlib
import copy
import json
import os
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lightning_megatron_rl.models.hf.files import INDEX_FILE, copy_settings
from lightning_megatron_rl.utilities.files import OURS, LockedDirectory, free_bytes, fsync
from lightning_megatron_rl.utilities.finite import describe_nonfinite, nonfinite_names
from lightning_megatron_rl.utilities.text_files import read_json

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_HEADER_SIZE = 1 << 18  # bytes kept free for the header, which comes first and is known last: some 1,300 tensors


class SafetensorsFile:
    """One safetensors file, written as tensors come: what is in memory is one tensor.

    The format (version 0.4): the header's length as a little-endian u64, the header in JSON padded with spaces, and the
    tensors' bytes end to end.

    Example:
        ``file = SafetensorsFile(path); file.add("a", torch.ones(2)); file.close()``, then
        ``safetensors.torch.load_file(path)["a"]``.
    """

    def __init__(self, path: Path) -> None:
        self._entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._header_size = len(json.dumps(self._entries))
        self.size = 0  # bytes of tensors
        self._stream = path.open("wb")
        self._stream.seek(8 + _HEADER_SIZE)

    @property
    def names(self) -> list[str]:
        """The tensors that are in the file."""
        return [name for name in self._entries if name != "__metadata__"]

    def has_room(self, name: str) -> bool:
        """Whether the header can take one more tensor of this name."""
        return self._header_size + 12 * len(name) + 256 < _HEADER_SIZE  # JSON writes a character in 12 bytes at most

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor."""
        tensor = tensor.detach().cpu().contiguous()
        size = tensor.numel() * tensor.element_size()
        entry = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.size, self.size + size],
        }
        self._entries[name] = entry
        self._header_size += len(json.dumps({name: entry}))
        if size:
            self._stream.write(memoryview(tensor.flatten().view(torch.uint8).numpy()))  # type: ignore[arg-type]
        self.size += size

    def close(self) -> None:
        """Write the header and wait until the file is on disk."""
        header = json.dumps(self._entries).encode()
        assert len(header) <= _HEADER_SIZE, (len(header), _HEADER_SIZE)
        self._stream.seek(0)
        self._stream.write(_HEADER_SIZE.to_bytes(8, "little") + header.ljust(_HEADER_SIZE))
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        with contextlib.suppress(OSError):  # on a full disk what is still in memory cannot be written either
            self._stream.close()


class PartialDirectory(LockedDirectory):
    """A hidden directory beside `directory` for unfinished files; it is gone after its `with`.

    The next process that writes `directory` removes leftovers of killed processes, not those of living ones.

    Raises:
        ValueError: `directory` exists and is not empty.
        OSError: Another process is writing it.
    """

    def __init__(self, directory: Path) -> None:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ValueError(f"{directory} exists and is not empty: remove it or choose another directory")
        self.directory = directory.absolute()
        super().__init__(self.directory.with_name(f".{self.directory.name}{OURS}partial"))

    def publish(self) -> None:
        """Rename it to its name when all of it is on disk."""
        for path in [*self.path.rglob("*"), self.path]:
            fsync(path)
        self.path.rename(self.directory)  # nothing, or an empty directory
        fsync(self.directory.parent)
        self.unlock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()


class CheckpointWriter:
    """Writes a Hugging Face checkpoint tensor by tensor into a temporary directory and renames it at the end.

    One tensor is held in memory. Raises `ValueError` if `directory` exists and is not empty.
    """

    def __init__(self, directory: Path, max_shard_size: int) -> None:
        self.directory = directory
        self.max_shard_size = max_shard_size
        self._partial = PartialDirectory(directory)
        self._shards: list[list[str]] = []  # names of the tensors in each that is closed
        self._file: SafetensorsFile | None = None
        self._total_size = 0  # bytes

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor, to a new file if the present one would become larger than `max_shard_size`.

        Raises:
            ValueError: Its numbers are more than float16 holds, as which it comes.
        """
        if tensor.dtype == torch.float16 and nonfinite_names([(name, tensor)]):
            raise ValueError(
                f"in float16, which ends at 65504, it has {describe_nonfinite(tensor)}: write bfloat16 or float32"
            )
        size = tensor.numel() * tensor.element_size()
        file = self._file
        if file is not None and (file.size + size > self.max_shard_size or not file.has_room(name)):
            self._close_shard()
        if self._file is None:
            self._file = SafetensorsFile(self._partial.path / f"shard-{len(self._shards)}")
        self._file.add(name, tensor)
        self._total_size += size

    def _close_shard(self) -> None:
        if self._file is not None:
            self._file.close()
            self._shards.append(self._file.names)
            self._file = None

    def finish(self, source: Path, config: Any, dtype: torch.dtype) -> None:
        """Add config, tokenizer and generation config of `source`, and make the checkpoint appear."""
        self._close_shard()
        count = len(self._shards)
        weight_map = {}
        for index, names in enumerate(self._shards):
            file = "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            (self._partial.path / f"shard-{index}").rename(self._partial.path / file)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            listing = {"metadata": {"total_size": self._total_size}, "weight_map": weight_map}
            (self._partial.path / INDEX_FILE).write_text(json.dumps(listing, indent=2) + "\n")
        copy_settings(source, self._partial.path)
        config = copy.deepcopy(config)
        config.dtype = dtype
        config.__dict__.pop("quantization_config", None)  # the weights are written as they are trained
        config.save_pretrained(self._partial.path)
        _keep_generation(source / "config.json", self._partial.path / "config.json")
        self._partial.publish()

    def abandon(self) -> None:
        """Remove what was written, unless it is finished."""
        if self._file is not None:
            self._file.abandon()
        self._partial.abandon()


def _keep_generation(source: Path, copy: Path) -> None:
    """Give a config back what it said of generation, such as `temperature`: Transformers reads it, but saves none."""
    from transformers import GenerationConfig

    said, saved = read_json(source), read_json(copy)
    lost = {name: said[name] for name in GenerationConfig().to_dict() if name in said and name not in saved}
    if lost:
        copy.write_text(json.dumps(saved | lost, indent=2, sort_keys=True) + "\n")


def check_space(directory: Path, needed: int, what: str) -> None:
    """Refuse to write `needed` bytes where there is no room for them.

    Raises:
        OSError: With the arithmetic.
    """
    free = free_bytes(directory)
    if needed > free:
        raise OSError(
            f"{directory} needs {needed / 1e9:.2f} GB ({what}), and its file system has {free / 1e9:.2f} GB free: make"
            f" room for {(needed - free) / 1e9:.2f} GB, or choose another directory"
        )
