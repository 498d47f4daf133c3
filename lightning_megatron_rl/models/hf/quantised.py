"""Quantised Hugging Face checkpoints: read as the weights that they stand for, or refused.

Megatron-Bridge takes the numbers of 8-bit tensors for weights, without their scales, in every family but a few.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_megatron_rl.models.families.registry import FAMILIES
from lightning_megatron_rl.models.hf.source import source_class

Quantisation = Literal["fp8", "mxfp4"]
SCALE = "_scale_inv"  # beside the name of the tensor that it belongs to
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def quantisation(config: Any) -> Quantisation | None:
    """Return how the weights of a Hugging Face config are stored, None for plain numbers.

    "fp8" is one scale per block of a weight (DeepSeek-V3, Qwen3-FP8), "mxfp4" that of GPT-OSS's experts.

    Raises:
        ValueError: In a way that is not read.
    """
    settings = _settings(config)
    if settings is None:
        return None
    method = settings.get("quant_method")
    if method == "fp8" and settings.get("weight_block_size"):
        return "fp8"
    if method == "mxfp4" and FAMILIES[config.model_type].mxfp4:
        return "mxfp4"
    blocks = "without weight_block_size" if method == "fp8" else ""
    raise ValueError(
        f"the model is quantised: quantization_config has quant_method={method!r} {blocks}".rstrip()
        + ". Read are fp8 in blocks (weight_scale_inv) and GPT-OSS's mxfp4: give the model's 16-bit weights."
    )


def block_size(config: Any) -> tuple[int, int]:
    """Return how many rows and columns of an fp8 weight share a scale."""
    settings = _settings(config)
    assert settings is not None
    rows, columns = settings["weight_block_size"]
    return int(rows), int(columns)


def _settings(config: Any) -> dict[str, Any] | None:
    settings = getattr(config, "quantization_config", None)
    if settings is None or isinstance(settings, dict):
        return settings
    found: dict[str, Any] = settings.to_dict()
    return found


def dequantised_source(directory: Path, config: Any) -> Any:
    """Return plain weights of a checkpoint in fp8 for Megatron-Bridge, as `hf_source.source_class` has stored ones.

    Args:
        directory: The checkpoint.
        config: Its Hugging Face config.
    """
    block = block_size(config)
    dtype = config.dtype or torch.bfloat16

    class Dequantised(source_class()):  # type: ignore[misc]
        def list_names(self) -> list[str]:
            return [name for name in super().list_names() if not name.endswith(SCALE)]

        def load_tensors(self, keys_to_load: list[str]) -> dict[str, Tensor]:
            found: dict[str, Tensor] = super().load_tensors(keys_to_load)
            for name in [name for name, tensor in found.items() if tensor.dtype in _FP8]:
                if name + SCALE not in self.key_to_filename_map:
                    raise ValueError(f"checkpoint {self.path} has {name} in fp8 without its scales {name + SCALE}")
                scale = super().load_tensors([name + SCALE])[name + SCALE]
                found[name] = dequantise(found[name], scale, block).to(dtype)
            return found

    return Dequantised(directory)


def dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply each block of a weight by its scale, in fp32.

    Args:
        weight: ``[rows, columns]`` in fp8.
        scale: ``[ceil(rows / block rows), ceil(columns / block columns)]``.
        block: Rows and columns of a block; those at the ends may be smaller.

    Raises:
        ValueError: There is not one scale per block.
    """
    expected = tuple(-(-size // length) for size, length in zip(weight.shape, block, strict=True))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"a weight of {tuple(weight.shape)} in blocks of {block} has {expected} scales, not {tuple(scale.shape)}"
        )
    per_row = scale.float().repeat_interleave(block[0], 0)[: weight.shape[0]]
    return weight.float() * per_row.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
