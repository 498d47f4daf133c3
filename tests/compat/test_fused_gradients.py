"""Layers that add weight gradients to Megatron's buffers themselves: which do, and that nothing is added twice.

Transformer Engine needs CUDA. What stands for it here are Megatron's own layers, whose fused product speaks with DDP as
Transformer Engine's does (`main_grad`, `grad_added_to_main_grad`, a gradient without meaning for autograd), with the
extension of Apex in Python. Transformer Engine itself is tested in `tests/gpu/test_backends.py`.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron_rl.compat.fused_gradients import fuse_weight_gradients
from tests.selection import by_default
from tests.training import Run, fit_sft

SAME = 1e-6  # fp32: only the order in which micro-batches are added differs
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def layer(**weights: torch.dtype | None) -> nn.Module:
    """A layer that can add gradients itself; of each weight the dtype of `main_grad`, None if it is not trained."""
    module = nn.Module()
    module.fuse_wgrad_accumulation = False
    for name, dtype in weights.items():
        parameter = nn.Parameter(torch.ones(2, 2), requires_grad=dtype is not None)
        if dtype is not None:
            parameter.main_grad = torch.zeros(2, 2, dtype=dtype)  # type: ignore[attr-defined]
        module.register_parameter(name, parameter)
    return module


@pytest.mark.parametrize(
    ("weights", "fused"),
    [
        ({"weight": torch.float32}, True),
        ({"weight0": torch.float32, "weight1": torch.float32}, True),
        ({"weight": torch.float32, "bias": None, "layer_norm_weight": None}, True),  # others than weights do not count
        ({"weight": None}, False),  # frozen
        ({"weight0": torch.float32, "weight1": None}, False),  # the layer would look at the first alone
        ({"weight": torch.bfloat16}, False),
        ({"layer_norm_weight": torch.float32}, False),
    ],
)
def test_layers_whose_weights_are_all_trained_in_fp32_take_part(weights, fused):
    module = layer(**weights)
    fuse_weight_gradients(nn.Sequential(module, nn.Linear(2, 2)))
    assert module.fuse_wgrad_accumulation is fused


class Products:
    """The extension of Apex in Python; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def wgrad_gemm_accum_fp32(self, inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        self.calls += 1
        main_grad.add_(grad_output.t() @ inputs)


def fit_fused(model: Path, strategy: dict[str, Any], world_size: int, fused: bool, options: dict[str, Any]) -> Run:
    """SFT on layers that can add their weight gradients, and do so if `fused`."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.tensor_parallel import layers

    from lightning_megatron_rl.models.hf import model as hf_model

    def tell(module: Any, value: bool) -> None:
        module.gradient_accumulation_fusion = value

    attribute = property(lambda module: module.gradient_accumulation_fusion, tell)
    overlap = strategy.pop("overlap", False)
    strategy["ddp_config"] = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap)
    products = Products()
    with (
        patch.object(layers, "fused_weight_gradient_mlp_cuda", products, create=True),
        patch.object(layers.ColumnParallelLinear, "fuse_wgrad_accumulation", attribute, create=True),
        patch.object(layers.RowParallelLinear, "fuse_wgrad_accumulation", attribute, create=True),
        patch.object(hf_model, "fuses_gradients", lambda *args, **kwargs: fused),
        patch.object(layers, "HAVE_TE", True),
        patch.object(layers, "get_dummy_wgrad", dummy, create=True),
    ):
        run = fit_sft(model, strategy, world_size, **options)
    run.extra["products"] = products.calls
    return run


def dummy(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """What Transformer Engine hands to autograd; its numbers mean nothing, and are no numbers here."""
    return torch.full(shape, 0.0 if zero else torch.nan, dtype=dtype)


CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "dense": ("qwen3", 1, {}, {}),
    "tied embeddings": ("qwen2_tied", 1, {}, {}),
    "experts, recomputed": ("qwen3_moe", 1, {}, {"module": {"model_config": RECOMPUTE}}),
    "overlapped, two replicas": ("qwen3", 2, {"overlap": True}, {}),
    "without the distributed optimizer": ("qwen3", 1, {"use_distributed_optimizer": False}, {}),
    "tp 2, sequence parallel": ("qwen3", 2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "pp 2": ("qwen3", 2, {"pipeline_model_parallel_size": 2}, {}),
}


@pytest.mark.parametrize("case", by_default([*CASES][:4], CASES))
def test_gradients_are_added_once(worker_pool, checkpoint, case):
    """Several micro-batches, two steps: the losses, norms and weights of products that leave the adding to DDP."""
    family, world_size, strategy, options = CASES[case]

    def fit(fused: bool) -> Run:
        place = {"world_size": world_size, "init_process_group": False}
        return worker_pool.run(fit_fused, checkpoint(family), strategy, world_size, fused, options, **place)[0]

    run, reference = fit(True), fit(False)
    assert reference.extra["products"] == 0 < run.extra["products"]
    for mine, theirs in zip(run.steps, reference.steps, strict=True):
        for name in ("policy/loss", "policy/grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=SAME), name
    for name, weight in reference.weights.items():
        torch.testing.assert_close(run.weights[name], weight, rtol=1e-5, atol=1e-6)
