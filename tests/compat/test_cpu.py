"""Megatron sees a torch without CUDA; everybody else sees the torch there is."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron_rl.compat.cpu import install_cpu_support
from tests.distributed import WorkerPool

CPU = torch.device("cpu")


def megatron_modules_with_real_torch() -> list[str]:
    loaded = [(name, module) for name, module in sys.modules.items() if name.startswith("megatron.")]
    return [name for name, module in loaded if vars(module).get("torch") is torch]


def install_between_imports() -> None:
    importlib.import_module("megatron.core.parallel_state")
    early = megatron_modules_with_real_torch()
    assert "megatron.core.parallel_state" in early
    install_cpu_support(CPU)
    assert megatron_modules_with_real_torch() == []
    late = "megatron.core.tensor_parallel.data"
    sys.modules.pop(late, None)
    module = importlib.import_module(late)
    assert module.torch is not torch
    assert module.torch.cuda.current_device() == CPU
    assert module.torch.Tensor is torch.Tensor
    finders, method = list(sys.meta_path), torch.Tensor.cuda
    install_cpu_support(CPU)
    assert sys.meta_path == finders
    assert torch.Tensor.cuda is method


def test_modules_imported_before_and_after_are_covered(fresh_worker: WorkerPool):
    fresh_worker.run(install_between_imports, world_size=1)


def as_megatron(expression: str, **names: Any) -> Any:
    """Evaluate `expression` as if it stood in a module of Megatron."""
    return eval(expression, {"__name__": "megatron.core.example", **names})


def look_from_outside() -> None:
    factories = {name: getattr(torch, name) for name in ("arange", "empty", "tensor", "zeros")}
    cuda = torch.cuda
    install_cpu_support(CPU)
    assert all(getattr(torch, name) is function for name, function in factories.items())
    assert torch.cuda is cuda
    tensor = torch.ones(2)
    assert tensor.type() == "torch.FloatTensor"
    assert tensor.type(torch.float64).dtype == torch.float64
    if not torch.cuda.is_available():
        for call in (tensor.cuda, torch.nn.Linear(1, 1).cuda, tensor.pin_memory):
            with pytest.raises((RuntimeError, AssertionError)):
                call()
    assert as_megatron("tensor.type()", tensor=tensor) == "torch.cuda.FloatTensor"
    assert as_megatron("tensor.cuda()", tensor=tensor) is tensor
    assert as_megatron("tensor.pin_memory()", tensor=tensor) is tensor
    assert as_megatron("tensor.record_stream(None)", tensor=tensor) is None
    layer = torch.nn.Linear(1, 1)
    assert as_megatron("layer.cuda()", layer=layer) is layer


def test_outsiders_see_the_torch_there_is(worker_pool: WorkerPool):
    worker_pool.run(look_from_outside, world_size=1)


def rotary_frequencies() -> list[float]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    install_cpu_support(CPU)
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_theta": 1e4, "rope_type": "default"}
    )
    return LlamaRotaryEmbedding(config).inv_freq.tolist()


def test_hugging_face_models_keep_their_rotary_frequencies(worker_pool: WorkerPool):
    [frequencies] = worker_pool.run(rotary_frequencies, world_size=1)
    assert frequencies == pytest.approx([1e4 ** (-2 * i / 16) for i in range(8)], rel=1e-6)  # fp32


def use_the_view() -> None:
    install_cpu_support(CPU)
    from megatron.core.tensor_parallel import random

    view = random.torch
    assert view.zeros(2, device="cuda").device == CPU
    assert view.zeros(2, device="cuda:0", pin_memory=True).device == CPU
    assert view.empty(2, device=torch.device("cuda")).device == CPU
    assert view.arange(3).tolist() == [0, 1, 2]
    assert not view.cuda.is_available()
    with view.cuda.stream(view.cuda.Stream()):
        event = view.cuda.Event()
        event.record()
        assert event.query()
    view.cuda.synchronize()


def test_cuda_means_the_cpu_to_megatron(worker_pool: WorkerPool):
    worker_pool.run(use_the_view, world_size=1)


def fork_the_tracker() -> tuple[list[float], list[float], list[float]]:
    from tests.models.workers import start_megatron

    start_megatron()
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.manual_seed(1)
    expected = torch.rand(2).tolist()
    torch.manual_seed(1)
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(2).tolist()
    outside = torch.rand(2).tolist()
    return expected, inside, outside


def test_the_rng_tracker_forks_the_cpu_generator(worker_pool: WorkerPool):
    [(expected, inside, outside)] = worker_pool.run(fork_the_tracker, world_size=1)
    assert outside == expected != inside


def gather_and_reduce_uneven_parts() -> tuple[list[list[float]], list[list[float]]]:
    from tests.models.workers import start_megatron

    start_megatron(2)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )

    rank, group = torch.distributed.get_rank(), parallel_state.get_tensor_model_parallel_group()
    part = torch.full((1 + 2 * rank, 2), 1.0 + rank, requires_grad=True)  # 1 row on rank 0, 3 on rank 1
    whole = gather_from_sequence_parallel_region(part, group=group, output_split_sizes=[1, 3])
    reduced = reduce_scatter_to_sequence_parallel_region(whole * 10, group, [1, 3])
    (reduced * torch.arange(1.0, 5.0)[[0] if rank == 0 else [1, 2, 3], None]).sum().backward()
    assert part.grad is not None
    return reduced.tolist(), part.grad.tolist()


def test_parts_of_unequal_size_are_gathered_and_reduced(worker_pool: WorkerPool):
    [(first, first_grad), (second, second_grad)] = worker_pool.run(gather_and_reduce_uneven_parts, world_size=2)
    assert first + second == [[20.0, 20.0]] + [[40.0, 40.0]] * 3  # both ranks hold 10 times the whole
    assert first_grad + second_grad == [[20.0 * row] * 2 for row in range(1, 5)]


def route_beside_transformer_engine() -> float:
    """Megatron's router where Transformer Engine is installed, whose product is CUDA's; its distance to torch's."""
    module = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    assert "te_general_gemm" in vars(module), "the name that Megatron has imported it under"

    def product(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("No CUDA GPUs are available")

    vars(module)["te_general_gemm"] = product
    install_cpu_support(CPU)
    tokens, weight = torch.randn(3, 1, 4), torch.randn(2, 4)
    found = module.router_gating_linear(tokens, weight, None, torch.float32)
    return float((found - tokens @ weight.t()).abs().max())


def test_routers_multiply_by_torch(fresh_worker: WorkerPool):
    assert fresh_worker.run(route_beside_transformer_engine, world_size=1) == [0.0]


def install_for_cuda() -> None:
    finders, methods = list(sys.meta_path), (torch.Tensor.cuda, torch.Tensor.type, torch.nn.Module.cuda)
    install_cpu_support(torch.device("cuda"))
    assert sys.meta_path == finders
    assert (torch.Tensor.cuda, torch.Tensor.type, torch.nn.Module.cuda) == methods


def test_nothing_happens_for_cuda(fresh_worker: WorkerPool):
    fresh_worker.run(install_for_cuda, world_size=1)


def fit_on_cuda_after_cpu(model: Path) -> str:
    """A run on the CPU, then one whose device is said to be CUDA; returns why the second was refused."""
    from unittest.mock import PropertyMock, patch

    from lightning_megatron_rl.models.hf.model import HFModel
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy
    from tests.training import fit_sft

    fit_sft(model, {}, 1, steps=1)
    device = PropertyMock(return_value=torch.device("cuda", 0))
    with (
        patch.object(MegatronStrategy, "root_device", device),
        patch("lightning.pytorch.accelerators.CPUAccelerator.setup_device"),
        patch("lightning_megatron_rl.strategy.checks.count_gpus", return_value=1),
        patch.object(HFModel, "build_chunks", side_effect=AssertionError("weights are loaded")),
        pytest.raises(RuntimeError) as refused,
    ):
        fit_sft(model, {}, 1, steps=1)
    return str(refused.value)


def test_cuda_after_cpu_in_one_process_is_refused_before_weights_are_loaded(worker_pool: WorkerPool, qwen3_dir):
    """Megatron would go on with the CPU's torch: 'No backend type associated with device type cpu'."""
    (message,) = worker_pool.run(fit_on_cuda_after_cpu, qwen3_dir, world_size=1, init_process_group=False)
    assert "this run is on cuda:0, and Megatron was adapted to the CPU earlier in this process" in message
    assert "in a new process" in message
