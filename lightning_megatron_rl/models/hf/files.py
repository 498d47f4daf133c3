"""Files of Hugging Face checkpoints: finding or downloading them, their tensors, and files beside weights."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_megatron_rl.utilities.files import below
from lightning_megatron_rl.utilities.text_files import read_json, user_path

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
ADAPTER_FILE = "adapter_config.json"  # PEFT's
_ORIGIN = "name_or_path"  # in the index of a checkpoint without weights
_REMEDY = "the download or copy is not complete, repeat it"
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
)
_TOKENIZER_JSON = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"  # where Transformers keeps those with names, "tool_use" say
_LARGEST = 100_000_000  # bytes of a file beside the weights; tokenizers have up to 40 million
DOWNLOADED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


def local_checkpoint(name_or_path: str) -> Path:
    """The directory of a checkpoint: a local one as it is, a hub name downloaded by one process of each node.

    Raises `ValueError` if the directory has an adapter, no config.json or no safetensors weights, if a file that its
    index names is missing, if one is damaged or cut short, or if the name cannot be downloaded.
    """
    path = user_path(name_or_path)
    if not path.is_dir():
        if path.exists() or _is_path(name_or_path):
            raise ValueError(
                f"model {name_or_path!r} is neither a directory nor a hub name ('organisation/model'): check the path"
            )
        path = _download(name_or_path)
    if (path / ADAPTER_FILE).is_file():
        raise ValueError(
            f"model directory {path} holds an adapter of PEFT's ({ADAPTER_FILE}): Transformers would add it to the"
            " model that this file names, vLLM would not. Merge it and save the result (`merge_and_unload`,"
            " `save_pretrained`); or, if the directory has a model of its own that you mean, remove the adapter's files"
        )
    if not (path / "config.json").is_file():
        raise ValueError(f"model directory {path} has no config.json: give the directory that `save_pretrained` wrote")
    _read_json(path / "config.json")
    if not any(path.glob("*.safetensors")):
        if origin(path) is not None:
            raise ValueError(
                f"model directory {path} has the settings of a checkpoint's model and no weights: "
                f"`lightning-megatron-rl convert {path.resolve().parent} DIRECTORY` makes a model of the checkpoint"
            )
        raise ValueError(
            f"model directory {path} has no *.safetensors weights: save the model again with "
            "`save_pretrained(..., safe_serialization=True)`"
        )
    if not (path / WEIGHTS_FILE).is_file() and not (path / INDEX_FILE).is_file():
        others = some(sorted(file.name for file in path.glob("*.safetensors")))
        raise ValueError(
            f"model directory {path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}, only {others}: Transformers would not"
            f" find its weights. Rename the file to {WEIGHTS_FILE}, or add the index"
        )
    files = sorted(set(weight_map(path).values()))
    missing = [file for file in files if not (path / file).is_file()]
    if missing:
        raise ValueError(
            f"model directory {path} lacks {some(missing)} of the files that {INDEX_FILE} names: {_REMEDY}"
        )
    for file in files:
        _check_weights(path / file)
    return path


def tokenizer_source(name_or_path: str) -> str:
    """Return what a tokenizer is loaded from: a directory that has one, with `~` expanded, or a hub name as it is.

    Raises:
        ValueError: There is no such directory, it has no tokenizer, or one of the tokenizer's files cannot be read.
    """
    path = user_path(name_or_path)
    if not path.is_dir():
        if path.exists() or _is_path(name_or_path):
            raise ValueError(
                f"tokenizer {name_or_path!r} is neither a directory nor a hub name ('organisation/model'): check the"
                " path"
            )
        return name_or_path
    check_tokenizer_files(path)
    return str(path)


def has_tokenizer(path: Path) -> bool:
    """Whether a directory has a tokenizer's vocabulary."""
    return any(any(path.glob(name)) for name in _VOCABULARIES)


def check_tokenizer_files(path: Path) -> None:
    """Refuse a directory without a tokenizer, and files of it that cannot be read.

    Raises:
        ValueError: With the file.
    """
    if not has_tokenizer(path):
        raise ValueError(
            f"{path} has no tokenizer: none of {', '.join(_VOCABULARIES)} is there. Save it with the tokenizer's"
            " `save_pretrained`, or copy these files from the original model"
        )
    if (path / "vocab.json").is_file() and not (path / "tokenizer.json").is_file() and not any(path.glob("merges.txt")):
        raise ValueError(f"{path} has vocab.json and neither merges.txt nor tokenizer.json: {_REMEDY}")
    for name in _TOKENIZER_JSON:
        if (path / name).is_file():
            _read_json(path / name)


def check_settings(path: Path) -> None:
    """Refuse a directory whose config.json or index cannot be read.

    Raises:
        ValueError: With the file.
    """
    for name in ("config.json", INDEX_FILE):
        if (path / name).is_file():
            _read_json(path / name)


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
            error = (
                f"cannot download model {name!r}, which is no directory in {Path.cwd()}: {type(exception).__name__}:"
                f" {exception}"
            )
    raise_everywhere(error)
    return Path(path if path is not None else snapshot_download(name, local_files_only=True))


class FailedEverywhereError(ValueError):
    """An error of some rank, raised on all ranks at the same place: all can go on from there."""


def raise_everywhere(error: str | None, kind: type[ValueError] = ValueError) -> None:
    """Raise `kind` on every rank if any has an `error`; a barrier otherwise, so that none is left waiting."""
    errors = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    messages = [message for message in errors if message is not None]
    if messages:
        raise kind(messages[0])


def anywhere(mine: bool) -> bool:
    """Return whether something holds on any rank; a collective."""
    everywhere = [mine]
    if dist.is_initialized():
        everywhere = [mine] * dist.get_world_size()
        dist.all_gather_object(everywhere, mine)
    return any(everywhere)


def fingerprint(path: Path) -> str:
    """Return a hash of a checkpoint's tensors: names, types, shapes and the first 4 KiB of each.

    The same for every way of cutting the tensors into files; directory and other files do not matter.
    """
    entries = []
    for file in (path / name for name in set(weight_map(path).values())):
        header, begin = read_header(file)
        with file.open("rb") as stream:
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                stream.seek(begin + start)
                content = hashlib.sha256(stream.read(min(end - start, 4096))).hexdigest()
                entries.append(f"{name} {entry['dtype']} {entry['shape']} {content}")
    return hashlib.sha256("\n".join(sorted(entries)).encode()).hexdigest()


def copy_settings(source: Path, directory: Path) -> None:
    """Copy what belongs to a checkpoint beside its weights and its config: tokenizer, chat template, generation."""
    for original in _settings(source):
        copy = directory / original.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(original, copy)


def settings_files(path: Path, name_or_path: str) -> dict[str, bytes]:
    """Return the files of a checkpoint but its weights: config, tokenizer, and an index with its tensors' names.

    Args:
        path: Directory of the checkpoint.
        name_or_path: How the user calls it, which `origin` reads.
    """
    listing = {"metadata": {_ORIGIN: name_or_path}, "weight_map": weight_map(path)}
    files = {"config.json": (path / "config.json").read_bytes(), INDEX_FILE: json.dumps(listing, indent=2).encode()}
    return files | {str(file.relative_to(path)): file.read_bytes() for file in _settings(path)}


def origin(directory: Path) -> str | None:
    """How the user of `settings_files` called the checkpoint; None for other directories."""
    index = directory / INDEX_FILE
    return _read_json(index).get("metadata", {}).get(_ORIGIN) if index.is_file() else None


def weight_map(path: Path) -> dict[str, str]:
    """Return the file of each tensor of a checkpoint, where Transformers looks: its one file, or what its index names.

    Raises:
        ValueError: An index that cannot be read, that names anything but files of the directory, or that names other
            files than the `model.safetensors` beside it.
    """
    single, index = path / WEIGHTS_FILE, path / INDEX_FILE
    if not index.is_file():
        return dict.fromkeys(read_header(single)[0], single.name) if single.is_file() else {}
    files = _read_json(index).get("weight_map")
    if not isinstance(files, dict):
        raise ValueError(f"{index} is damaged: it has no weight_map; {_REMEDY}")
    for file in {file for file in files.values() if isinstance(file, str)}:
        try:
            below(path, file)
        except ValueError as error:
            raise ValueError(f"{index} names a file outside its directory: {error}. It was not opened.") from error
    strange = [name for name, file in files.items() if not isinstance(file, str) or Path(file).name != file]
    if strange:
        raise ValueError(
            f"{index} is damaged: {some(strange)} should have the name of a file in this directory, not"
            f" {files[strange[0]]!r}; {_REMEDY}"
        )
    if single.is_file() and set(files.values()) != {single.name}:
        others = some(sorted(set(files.values())))
        raise ValueError(
            f"model directory {path} has both {WEIGHTS_FILE} and an index of other files ({others}): Transformers loads"
            " the one, other programs the others. Remove what does not belong to the model"
        )
    return files


@dataclass(frozen=True)
class StoredTensor:
    """What a checkpoint's files say of one tensor."""

    file: str
    dtype: str  # in safetensors' words: "BF16", "F8_E4M3"
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape} in {self.file}"


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return what a checkpoint's files hold, by name; only their headers are read.

    Raises:
        ValueError: The index and the files disagree: a tensor is not in the file that it is said to be in, is in
            several files, or is not in the index.
    """
    files = weight_map(path)
    found: dict[str, list[StoredTensor]] = {}
    for file in sorted(set(files.values())):
        for name, entry in read_header(path / file)[0].items():
            found.setdefault(name, []).append(StoredTensor(file, entry["dtype"], tuple(entry["shape"])))
    absent = [name for name, file in files.items() if file not in {tensor.file for tensor in found.get(name, [])}]
    if absent:
        raise ValueError(
            f"{path / INDEX_FILE} says that {some(absent)} {'is' if len(absent) == 1 else 'are'} in"
            f" {some(sorted({files[name] for name in absent}))}, which has no such tensor: {_REMEDY}"
        )
    twice = [name for name, tensors in found.items() if len(tensors) > 1]
    if twice:
        raise ValueError(
            f"model directory {path} has {some(twice)} in several files"
            f" ({' and '.join(tensor.file for tensor in found[twice[0]])}): which one counts depends on who reads them."
            f" Remove one; or {_REMEDY}"
        )
    unlisted = [name for name in found if name not in files]
    if unlisted:
        raise ValueError(
            f"model directory {path} has {some(unlisted)} in {found[unlisted[0]][0].file}, but not in {INDEX_FILE}:"
            f" Transformers would load it, other programs not. Write the index anew; or {_REMEDY}"
        )
    return {name: tensor for name, (tensor,) in found.items()}


def some(names: Sequence[str], limit: int = 3) -> str:
    """Return the first names of a list, and how many more there are.

    Example:
        ``some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"``
    """
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def num_weights(path: Path) -> int:
    """Return how many numbers a checkpoint's files hold."""
    headers = [read_header(path / file)[0] for file in sorted(set(weight_map(path).values()))]
    return sum(math.prod(entry["shape"]) for header in headers for entry in header.values())


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return what a safetensors file says about its tensors, by name, and where their bytes begin.

    Raises:
        ValueError: The file is not one, damaged, or of another size than its header says.
    """
    there = file.stat().st_size
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(min(size, there)))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} is damaged or no safetensors file: its header cannot be read ({error}); {_REMEDY}"
            ) from error
    needed = 8 + size + end
    if needed != there:
        raise ValueError(
            f"{file} is damaged: its header and tensors are 8 + {size:,} + {end:,} = {needed:,} bytes, and it has"
            f" {there:,}; {_REMEDY}"
        )
    return header, 8 + size


def _check_weights(file: Path) -> None:
    """Refuse a file that safetensors would not open, whose own messages do not name it."""
    from safetensors import SafetensorError, safe_open

    read_header(file)
    try:
        with safe_open(file, framework="np"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or no safetensors file: {error}; {_REMEDY}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = read_json(file)
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__} instead of an object")
    except ValueError as error:  # not JSON, or not text
        raise ValueError(f"{file} is damaged: it cannot be read as JSON ({error}); {_REMEDY}") from error
    return content


def _is_path(name: str) -> bool:
    """Whether a name can only be that of a directory; `models/mine` could be one of the hub's, too."""
    return Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") != 1


def _settings(source: Path) -> list[Path]:
    """The files of a checkpoint that belong to its copy; not, say, a data set that a user keeps beside them."""
    files = [*source.iterdir(), *source.glob(_MORE_TEMPLATES)]
    return [file for file in files if file.is_file() and _belongs(file.name) and file.stat().st_size <= _LARGEST]


def _belongs(name: str) -> bool:
    """Whether a file of the source checkpoint belongs to its copy: the tokenizer and settings, not weights or cards."""
    return not (
        name.endswith(WEIGHT_SUFFIXES)
        or name.endswith(".index.json")
        or name.startswith(".")
        or name in ("config.json", "README.md")
    )
