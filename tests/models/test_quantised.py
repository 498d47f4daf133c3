"""Quantised checkpoints are the models that they stand for, or are refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lightning_megatron_rl.models.hf.quantised import dequantise, quantisation
from tests.convert.jobs import assert_same_tensors, convert, must_convert, tensors
from tests.convert.test_roundtrip import NOT_CONVERTED
from tests.distributed import WorkerPool
from tests.tiny_models import save_tiny_model
from tests.training import fit_sft

BLOCK = (16, 32)  # neither divides the tiny models' sizes everywhere
PLAIN = ("embed_tokens", "lm_head", "norm", "layernorm", "mlp.gate.weight", "bias")  # as DeepSeek leaves them


def blocks(shape: torch.Size) -> list[tuple[slice, slice]]:
    return [
        (slice(row, row + BLOCK[0]), slice(column, column + BLOCK[1]))
        for row in range(0, shape[0], BLOCK[0])
        for column in range(0, shape[1], BLOCK[1])
    ]


def quantise(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return fp8 numbers, scales and, block by block, the bf16 weight that they stand for."""
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    meant = torch.empty(weight.shape, dtype=torch.float32)
    scales = []
    for place in blocks(weight.shape):
        scale = weight[place].float().abs().max() / 448  # the largest number of e4m3
        stored[place] = (weight[place].float() / scale).to(torch.float8_e4m3fn)
        meant[place] = stored[place].float() * scale
        scales.append(scale)
    columns = -(-weight.shape[1] // BLOCK[1])
    return stored, torch.stack(scales).view(-1, columns), meant.bfloat16()


def save(source: Path, directory: Path, stored: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """Save the tensors of a quantised model beside the other files of its source."""
    directory.mkdir()
    for file in source.iterdir():
        if not file.name.endswith(".safetensors"):
            (directory / file.name).write_bytes(file.read_bytes())
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config |= {"quantization_config": settings, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))


def save_mxfp4(source: Path, directory: Path) -> dict[str, Tensor]:
    """Save a tiny GPT-OSS as it is released, with experts of random 4-bit numbers; return what they stand for."""
    stored, meant = {}, {}
    generator = torch.Generator().manual_seed(0)
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = meant[name] = weight.bfloat16()
            continue
        experts, width, out = weight.shape
        blocks = torch.randint(256, (experts, out, width // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(115, 125, (experts, out, width // 32), generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales)
    save(source, directory, stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    return meant


def save_quantised(source: Path, directory: Path) -> dict[str, Tensor]:
    """Save a tiny model in fp8; return the weights that it stands for."""
    stored, meant = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        if weight.ndim != 2 or any(part in name for part in PLAIN):
            stored[name] = meant[name] = weight if name.endswith("correction_bias") else weight.bfloat16()
            continue
        stored[name], stored[f"{name}_scale_inv"], meant[name] = quantise(weight)
    save(source, directory, stored, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)})
    return meant


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_fp8_is_converted_as_what_it_stands_for(worker_pool: WorkerPool, tmp_path: Path, family: str):
    """Fails without `dequantised_source`: Qwen3's bridge takes the 8-bit numbers for weights and nothing says so."""
    meant = save_quantised(save_tiny_model(tmp_path / "source", family), tmp_path / "fp8")
    shown = must_convert(worker_pool, tmp_path / "fp8", tmp_path / "c.ckpt", "--verify")
    assert "verified: every tensor is the same" in shown
    must_convert(worker_pool, tmp_path / "c.ckpt", tmp_path / "hf", "--verify")
    left_out = NOT_CONVERTED.get(family, "-")
    assert_same_tensors(
        tensors(tmp_path / "hf"), {name: tensor for name, tensor in meant.items() if not name.startswith(left_out)}
    )
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())


def test_mxfp4_is_converted_as_transformers_reads_it(worker_pool: WorkerPool, tmp_path: Path):
    meant = save_mxfp4(save_tiny_model(tmp_path / "source", "gpt_oss"), tmp_path / "mxfp4")
    must_convert(worker_pool, tmp_path / "mxfp4", tmp_path / "c.ckpt", "--verify")
    must_convert(worker_pool, tmp_path / "c.ckpt", tmp_path / "hf", "--verify")
    assert_same_tensors(tensors(tmp_path / "hf"), meant)
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())


def test_fp8_trains_as_what_it_stands_for(worker_pool: WorkerPool, tmp_path: Path):
    """The same first loss as that of the model in bf16, and one without scales is refused."""
    source = save_tiny_model(tmp_path / "source", "qwen3")
    meant = save_quantised(source, tmp_path / "fp8")
    save_file(meant, source / "model.safetensors", {"format": "pt"})
    losses = [
        worker_pool.run(fit_sft, model, {}, 1, steps=1, world_size=1, init_process_group=False)[0].steps[0]
        for model in (source, tmp_path / "fp8")
    ]
    assert losses[0]["policy/loss"] == losses[1]["policy/loss"]

    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    lost = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    del stored[lost]
    save_file(stored, tmp_path / "fp8" / "model.safetensors", {"format": "pt"})
    code, shown = convert(worker_pool, tmp_path / "fp8", tmp_path / "c.ckpt")
    assert code != 0
    assert f"weights in fp8 without their scales {lost}" in shown
    assert not (tmp_path / "c.ckpt").exists()


def test_number_of_scales_is_checked():
    weight = torch.ones(33, 32).to(torch.float8_e4m3fn)
    assert torch.equal(dequantise(weight, torch.full((3, 1), 2.0), BLOCK), torch.full((33, 32), 2.0))
    with pytest.raises(ValueError, match=r"\(33, 32\) in blocks of \(16, 32\) has \(3, 1\) scales, not \(2, 1\)"):
        dequantise(weight, torch.ones(2, 1), BLOCK)


@pytest.mark.parametrize(
    ("settings", "family", "expected"),
    [
        (None, "qwen3", None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "qwen3", "fp8"),
        ({"quant_method": "mxfp4"}, "gpt_oss", "mxfp4"),
        ({"quant_method": "mxfp4"}, "qwen3", "quant_method='mxfp4'"),
        ({"quant_method": "fp8"}, "qwen3", "quant_method='fp8' without weight_block_size"),
        ({"quant_method": "awq"}, "llama", "quant_method='awq'. Read are fp8 in blocks"),
        ({"quant_method": "compressed-tensors"}, "llama", "give the model's 16-bit weights"),
    ],
)
def test_other_quantisations_are_refused(settings: Any, family: str, expected: str | None):
    config = SimpleNamespace(model_type=family, quantization_config=settings)
    if expected in (None, "fp8", "mxfp4"):
        assert quantisation(config) == expected
        return
    with pytest.raises(ValueError, match=expected):
        quantisation(config)
