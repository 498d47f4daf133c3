"""Adam with the state layout of the fused optimizers: torch's values, Megatron's optimizer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_megatron_rl.compat.adam import Adam
from tests.distributed import WorkerPool


def train(make: Callable[[list[Any]], torch.optim.Optimizer]) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,), (2,))]
    optimizer = make([{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0, "lr": 0.02}])
    for _ in range(5):
        for weight in weights[:2]:  # the last one never has a gradient
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return weights, optimizer


@pytest.mark.parametrize(("adam_w_mode", "theirs"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_values_are_those_of_torch(adam_w_mode: bool, theirs: type[torch.optim.Optimizer]):
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    expected, _ = train(lambda groups: theirs(groups, **options))
    weights, optimizer = train(lambda groups: Adam(groups, adam_w_mode=adam_w_mode, **options))
    for ours, reference in zip(weights, expected, strict=True):
        assert torch.equal(ours, reference)  # the same kernels
    assert [group["step"] for group in optimizer.param_groups] == [5, 5]
    assert set(optimizer.state[weights[0]]) == {"exp_avg", "exp_avg_sq"}
    assert weights[2] not in optimizer.state


def test_closure_is_called_with_gradients():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = Adam([weight], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 1.0
    assert weight.item() == pytest.approx(0.9)  # the first step is lr times the sign


def test_cuda_graphs_are_refused():
    with pytest.raises(ValueError, match="optimizer_cuda_graph=True needs"):
        Adam([torch.nn.Parameter(torch.ones(1))], capturable=True)


def distributed_optimizer_step() -> tuple[str, list[Any]]:
    """The class inside Megatron's distributed optimizer, and the `step` of each group in its state after one step."""
    from tests.models.workers import start_megatron

    start_megatron(torch.distributed.get_world_size())
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True)
    module = MegatronModule(config)
    module.layer = ColumnParallelLinear(8, 8, config=config, init_method=torch.nn.init.ones_, bias=True)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(config, ddp, module)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, use_distributed_optimizer=True), [model])
    model.module.layer(torch.ones(2, 8))[0].sum().backward()
    model.finish_grad_sync()
    optimizer.step()
    states = optimizer.state_dict()
    states = states if isinstance(states, list) else [states]
    steps = [group["step"] for state in states for group in state["optimizer"]["param_groups"]]
    return f"{type(optimizer.chained_optimizers[0].optimizer).__module__}", steps


def test_megatrons_distributed_optimizer_keeps_the_step_for_checkpoints(worker_pool: WorkerPool):
    [(module, steps)] = worker_pool.run(distributed_optimizer_step, world_size=1)
    assert module == "lightning_megatron_rl.compat.adam"
    assert steps
    assert set(steps) == {1}
