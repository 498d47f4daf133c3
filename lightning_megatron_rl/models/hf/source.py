"""The tensors of a checkpoint's files for Megatron-Bridge, which reads each file's list of them once.

Megatron-Bridge's own source opens a file anew for every tensor, which reads the names and places of all that are in it,
and looks each name up in a list of all: time goes with the square of the number of tensors, of which mixtures of
experts have tens of thousands.
"""

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron_rl.models.hf.files import read_header, weight_map
from lightning_megatron_rl.models.hf.writer import SAFETENSORS_DTYPES

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


class Names(list[str]):
    """Names of which one is found at once, however many there are; they stay as they are."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self._found = frozenset(self)

    def __contains__(self, name: object) -> bool:
        return name in self._found


@cache
def source_class() -> Any:
    """Return our class of Megatron-Bridge's `SafeTensorsStateSource`, which is imported late."""
    from megatron.bridge.models.hf_pretrained.state import SafeTensorsStateSource

    class FileTensors(SafeTensorsStateSource):  # type: ignore[misc]
        """A directory of safetensors files; a tensor is a view of their memory-mapped bytes."""

        _names: Names | None = None

        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self._files: dict[str, str] | None = None
            self._headers: dict[Path, tuple[tuple[int, ...], dict[str, Any], int]] = {}

        @property
        def key_to_filename_map(self) -> dict[str, str]:
            """The file of each tensor, by Transformers' rule; Megatron-Bridge would take every file that is there."""
            if self._files is None:
                self._files = weight_map(self.path)
            return self._files

        def get_all_keys(self) -> list[str]:
            if self._names is None:
                self._names = Names(self.list_names())
            return self._names

        def list_names(self) -> list[str]:
            """Return the names of all tensors that there are for Megatron-Bridge."""
            return sorted(self.key_to_filename_map)

        def load_tensors(self, keys_to_load: list[str]) -> dict[str, Tensor]:
            return {name: self._read(name) for name in keys_to_load}

        def _read(self, name: str) -> Tensor:
            file = self.path / self.key_to_filename_map[name]
            header, begin = self._header(file)
            if name not in header:
                raise KeyError(f"{file} has no tensor {name}, though the checkpoint's index says so")
            entry = header[name]
            if entry["dtype"] not in _DTYPES:
                tensor: Tensor = super().load_tensors([name])[name]
                return tensor
            start, end = entry["data_offsets"]
            return _mapped(file, begin + start, end - start, _DTYPES[entry["dtype"]]).view(entry["shape"])

        def _header(self, file: Path) -> tuple[dict[str, Any], int]:
            """A file's header and its size, read once unless another file takes its place."""
            there = os.stat(file)
            version = (there.st_ino, there.st_mtime_ns, there.st_size)
            if file not in self._headers or self._headers[file][0] != version:
                self._headers[file] = (version, *read_header(file))
            return self._headers[file][1:]

    return FileTensors


def _mapped(file: Path, start: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
    """Return some bytes of a file as a vector, which reads them when it is read."""
    if num_bytes == 0:
        return torch.empty(0, dtype=dtype)
    mapped = torch.from_file(str(file), shared=False, size=start + num_bytes, dtype=torch.uint8)[start:]
    return (mapped.clone() if start % dtype.itemsize else mapped).view(dtype)
