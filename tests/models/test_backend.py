"""The choice of layer backend: defaults, refusals and their remedies."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from lightning_megatron_rl.models.families.registry import FAMILIES
from lightning_megatron_rl.models.layers.backend import resolve_layer_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WITHOUT_TE = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is installed"
)


def on_gpu_with_engine(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Make this machine look like one where Transformer Engine is installed and the GPU is of this capability."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_the_cpu_always_gets_torch():
    assert resolve_layer_backend("auto", CPU) == "torch"
    assert resolve_layer_backend("torch", CPU) == "torch"


@WITHOUT_TE
def test_cuda_without_transformer_engine_gets_torch():
    assert resolve_layer_backend("auto", CUDA) == "torch"


@WITHOUT_TE
def test_transformer_engine_must_be_installed():
    with pytest.raises(ValueError, match=r"not installed: pip install"):
        resolve_layer_backend("transformer_engine", CUDA)


def test_transformer_engine_needs_cuda():
    with pytest.raises(ValueError, match=r"runs on CUDA only.*'cpu'.*use train.layer_backend="):
        resolve_layer_backend("transformer_engine", CPU)


def test_context_parallelism_in_fp32_is_for_torch(monkeypatch):
    """Transformer Engine stops with "no dot product attention backend" in the first forward pass."""
    on_gpu_with_engine(monkeypatch, (9, 0))
    assert resolve_layer_backend("auto", CUDA, params_dtype=torch.float32) == "transformer_engine"
    assert resolve_layer_backend("auto", CUDA, context_parallel_size=2) == "transformer_engine"
    split = {"params_dtype": torch.float32, "context_parallel_size": 2}
    assert resolve_layer_backend("auto", CUDA, **split) == "torch"
    with pytest.raises(ValueError, match=r"context_parallel_size=2 in fp32: .*bf16-mixed.*layer_backend='torch'"):
        resolve_layer_backend("transformer_engine", CUDA, **split)


def test_latent_attention_in_fp32_is_for_torch(monkeypatch):
    on_gpu_with_engine(monkeypatch, (9, 0))
    assert resolve_layer_backend("auto", CUDA, latent_attention=True) == "transformer_engine"
    latent = {"params_dtype": torch.float32, "latent_attention": True}
    assert resolve_layer_backend("auto", CUDA, **latent) == "torch"
    with pytest.raises(ValueError, match=r"latent attention \(kv_lora_rank\) in fp32: this was never compared"):
        resolve_layer_backend("transformer_engine", CUDA, **latent)


def test_a_family_that_was_not_compared_is_for_torch(monkeypatch):
    on_gpu_with_engine(monkeypatch, (9, 0))
    family = replace(FAMILIES["qwen3"], transformer_engine=False)
    assert resolve_layer_backend("auto", CUDA, family=FAMILIES["qwen3"]) == "transformer_engine"
    assert resolve_layer_backend("auto", CUDA, family=family) == "torch"
    with pytest.raises(ValueError, match=r"'transformer_engine' with Qwen3ForCausalLM: .*never compared.*'torch'"):
        resolve_layer_backend("transformer_engine", CUDA, family=family)


@pytest.mark.parametrize(
    ("capability", "backend"), [((7, 5), "torch"), ((8, 0), "transformer_engine"), ((9, 0), "transformer_engine")]
)
def test_auto_takes_transformer_engine_on_gpus_that_it_is_made_for(monkeypatch, capability, backend):
    on_gpu_with_engine(monkeypatch, capability)
    assert resolve_layer_backend("auto", CUDA) == backend
    assert resolve_layer_backend("transformer_engine", CUDA) == "transformer_engine"  # the user's own risk


def test_a_typo_is_named():
    with pytest.raises(ValueError, match="'pytorch' is none of"):
        resolve_layer_backend("pytorch", CPU)  # type: ignore[arg-type]
