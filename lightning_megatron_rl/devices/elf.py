"""Reads which shared libraries a compiled extension is linked against, without loading it."""

import struct
from pathlib import Path

_DYNAMIC, _NEEDED = 6, 1  # type of a section; tag of its entries (System V ABI, chapters 4 and 5)


def needed_libraries(path: Path) -> list[str]:
    """Return the DT_NEEDED names of a 64-bit little-endian ELF file.

    Raises:
        ValueError: It is no such file.

    Example:
        ``needed_libraries(Path("vllm/_C.abi3.so"))`` has ``"libcudart.so.13"`` where vLLM is built for CUDA 13.
    """
    with path.open("rb") as file:
        header = file.read(64)
        if header[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is no 64-bit little-endian ELF file")
        (sections_at,) = struct.unpack_from("<Q", header, 40)
        entry_size, count = struct.unpack_from("<HH", header, 58)
        file.seek(sections_at)
        table = file.read(entry_size * count)
        sections = [struct.unpack_from("<IIQQQQIIQQ", table, index * entry_size) for index in range(count)]
        names: list[str] = []
        for section in sections:
            _, kind, _, _, offset, size, strings_index, *_ = section
            if kind != _DYNAMIC:
                continue
            file.seek(offset)
            entries = list(struct.iter_unpack("<qQ", file.read(size)))
            strings = sections[strings_index]
            file.seek(strings[4])
            text = file.read(strings[5])
            names += [text[value : text.index(b"\0", value)].decode() for tag, value in entries if tag == _NEEDED]
        return names


def cuda_major(libraries: list[str]) -> int | None:
    """Return the major version of the CUDA runtime among `libraries`, None if there is none."""
    for name in libraries:
        if name.startswith("libcudart.so."):
            return int(name.split(".")[2])
    return None
