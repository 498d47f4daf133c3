"""Checks a checkpoint's tensors against its config.json: names, shapes and types, before weights are read.

What is expected comes from Transformers: the model of the config is built on the meta device, where it has shapes and
no numbers. Transformers itself only warns of missing or unknown tensors; here both are refused.
"""

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_megatron_rl.compat.transformers_names import checkpoint_shapes, ignored_patterns, tied_names
from lightning_megatron_rl.models.families.registry import FAMILIES
from lightning_megatron_rl.models.hf.files import StoredTensor, some, stored_tensors
from lightning_megatron_rl.models.hf.quantised import SCALE, block_size, quantisation
from lightning_megatron_rl.utilities.remote_code import trusts_remote_code

OUTPUT_LAYER = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
_MXFP4 = ("_blocks", "_scales")
_MXFP4_BLOCK = 32  # numbers that share a scale; two to a byte
_FLOATS = ("F64", "F32", "F16", "BF16")
_FP8 = ("F8_E4M3", "F8_E5M2")
_ROWS = 8192  # of a weight, that are compared at a time


def check_weights(path: Path, config: Any, *, head: str | None = None) -> None:
    """Refuse a checkpoint whose tensors are not those of its config.

    Args:
        path: Of the checkpoint.
        config: Its Hugging Face config.
        head: Name of the value head in the place of the output layer, which is then not read; it may be missing.

    Raises:
        ValueError: With file, tensor, what was found and what was expected.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)  # building a model writes into it
    try:
        with torch.device("meta"):  # eager: the config may ask for kernels that are not installed
            model = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trusts_remote_code(), attn_implementation="eager"
            )
    except Exception as error:  # of many kinds, for sizes of 0 and values that contradict each other
        raise ValueError(
            f"Transformers cannot build the model of {path / 'config.json'}: {type(error).__name__}: {error}"
        ) from error
    tied = tied_names(model)
    if tied and not FAMILIES[config.model_type].can_be_tied and head is None:
        raise ValueError(
            f"{config.model_type} with tie_word_embeddings=true is not supported: Megatron-Bridge keeps the output"
            " layer apart. Set it to false in config.json and store lm_head.weight"
        )
    shapes = checkpoint_shapes(model)
    optional = set(tied)
    if head is not None:
        shapes[head] = (1, config.hidden_size)
        optional |= {head, OUTPUT_LAYER}
    stored = stored_tensors(path)
    shapes = _stored_shapes(shapes, stored, config)
    ignored = re.compile("|".join([*ignored_patterns(model), _extra_layers(config)]))
    missing = [name for name in shapes if name not in stored and name not in optional]
    unknown = [name for name in stored if name not in shapes and not ignored.search(name)]
    _refuse_names(path, missing, unknown, stored)
    wrong = [
        f"{tensor.file}: {name} has shape {tensor.shape} instead of {shapes[name]}"
        for name, tensor in stored.items()
        if name in shapes and tensor.shape != shapes[name]
    ]
    if wrong:
        raise ValueError(
            f"checkpoint {path}: {len(wrong)} of {len(stored)} tensors have another shape than the model of its"
            f" config.json: {some(wrong)}: weights and config do not belong together"
        )
    strange = [
        f"{tensor.file}: {name} has type {tensor.dtype} instead of {' or '.join(allowed)}"
        for name, tensor in stored.items()
        if name in shapes and tensor.dtype not in (allowed := _types(name, shapes))
    ]
    if strange:
        raise ValueError(
            f"checkpoint {path}: {len(strange)} of {len(stored)} tensors have a type that is no weight's:"
            f" {some(strange)}. Store them as floating-point numbers; a quantised model needs"
            " quantization_config in its config.json"
        )
    if tied and OUTPUT_LAYER in stored and head is None:
        _check_tied(path, stored)


def _extra_layers(config: Any) -> str:
    """A pattern of the layers of multi-token prediction, which come behind the others."""
    count = getattr(config, "num_nextn_predict_layers", None) or 0
    numbers = "|".join(str(config.num_hidden_layers + index) for index in range(count))
    return rf"^model\.layers\.({numbers})\." if numbers else r"(?!)"


def _stored_shapes(
    shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, StoredTensor], config: Any
) -> dict[str, tuple[int, ...]]:
    """Expected shapes of what is in the files: with the scales of fp8 weights, with MXFP4's blocks for experts."""
    quantised = quantisation(config)
    expected = dict(shapes)
    for name, shape in shapes.items():
        if quantised == "fp8" and name in stored and stored[name].dtype in _FP8 and len(shape) == 2:
            expected[name + SCALE] = tuple(
                -(-size // length) for size, length in zip(shape, block_size(config), strict=True)
            )
        if quantised == "mxfp4" and name not in stored and any(name + part in stored for part in _MXFP4):
            experts, columns, rows = expected.pop(name)  # blocks are of the transposed matrix
            blocks, scales = (name + part for part in _MXFP4)
            expected[scales] = (experts, rows, columns // _MXFP4_BLOCK)
            expected[blocks] = (*expected[scales], _MXFP4_BLOCK // 2)
    return expected


def _refuse_names(path: Path, missing: list[str], unknown: list[str], stored: Mapping[str, StoredTensor]) -> None:
    scales = [name for name in missing if name.endswith(SCALE)]
    if scales:
        raise ValueError(f"checkpoint {path} has weights in fp8 without their scales {some(scales)}")
    if missing:
        besides = f", and has tensors that the model has not: {some(unknown)}" if unknown else ""
        raise ValueError(
            f"checkpoint {path} has no weights for {some(missing)}{besides}. Transformers would fill them with random"
            " numbers. The download or copy is not complete, or weights and config.json are of different models"
        )
    if unknown:
        raise ValueError(
            f"checkpoint {path} has {len(unknown)} tensors that the model of its config.json has not: "
            + some([f"{name} ({stored[name]})" for name in unknown])
            + ". They would be dropped. Correct config.json (a bias? more layers?), or remove them"
        )


def _types(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """What a tensor's numbers may be stored as; only quantised models have scales, or blocks."""
    if name.endswith(_MXFP4):
        return ("U8",)
    return (*_FLOATS, *_FP8) if name + SCALE in shapes else _FLOATS


def _check_tied(path: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse an output layer that is not the embedding, where config.json says that they are one weight."""
    from safetensors import safe_open

    tensors = {}
    for name in (EMBEDDING, OUTPUT_LAYER):
        with safe_open(path / stored[name].file, framework="pt") as file:
            tensors[name] = file.get_slice(name)
    rows = stored[EMBEDDING].shape[0]
    for start in range(0, rows, _ROWS):
        ours, theirs = (tensor[start : start + _ROWS] for tensor in tensors.values())
        different = (ours != theirs.to(ours.dtype)).any(1)
        if different.any():
            row = start + int(different.int().argmax())
            raise ValueError(
                f"checkpoint {path}: config.json has tie_word_embeddings=true, but {OUTPUT_LAYER} is not {EMBEDDING}:"
                f" they differ from row {row} of {rows} on. Transformers uses both, vLLM the embedding alone. Set"
                f" tie_word_embeddings to false in config.json to use both, or remove {OUTPUT_LAYER} to use the"
                " embedding"
            )
