"""The gradients of a training step, whole and under Hugging Face names, in every layout.

A gradient is exported as its parameter is: it stands in the parameter's place while Megatron-Bridge converts it. What
conversion does (gathering parts, reordering rows, transposing) is linear, so the gradient of the converted weight comes
out.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from lightning_megatron_rl.modules.policy import PolicyModule

_ULP = 2.0**-23  # of fp32, relative


def export_gradients(module: PolicyModule) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradient of each trained weight as the optimizer is about to use it; a collective of all ranks.

    Call it between the backward pass and the optimizer's step. With adapters these are the gradients of A and B.

    Args:
        module: In training, in fp32.
    """
    chunks = list(module.model)
    module.strategy.gather_parameters()
    with gradients_in_place(chunks):
        if module.train_settings.lora is None:
            yield from module.hf_model.export_weights(chunks, torch.float32)
            return
        dense, experts = module.hf_model.export_adapter(chunks)
        yield from dense.items()
        for name, (a, b) in experts.items():
            yield from ((f"{name}.lora_A", a), (f"{name}.lora_B", b))


@contextmanager
def gradients_in_place(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Let the parameters of wrapped chunks hold their gradients for a while; a collective of all replicas."""
    weights: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for parameter, gradient in _whole_gradients(chunks):
            weights.append((parameter, parameter.detach().clone()))
            parameter.copy_(gradient)
        held = {id(parameter) for parameter, _ in weights}
        for parameter in (p for chunk in chunks for p in _numbers(chunk) if id(p) not in held):
            weights.append((parameter, parameter.detach().clone()))
            parameter.zero_()  # frozen
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, weight in weights:
                parameter.copy_(weight)


def perturb(chunks: Sequence[nn.Module], seed: int) -> None:
    """Move each number of fp32 parameters by about a unit in its last place, up or down.

    The effect on a run is that of rounding: how far its sums depend on the order of their terms.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                signs = torch.randint(0, 2, parameter.shape, generator=generator, device="cpu", dtype=torch.int8)
                parameter.mul_(1 + _ULP * (2.0 * signs.to(parameter.device) - 1))


def _numbers(chunk: nn.Module) -> Iterator[Tensor]:
    """Parameters, and the biases of routers, which are buffers."""
    yield from chunk.parameters()
    for name, buffer in chunk.named_buffers():
        if name.endswith(".expert_bias"):
            yield buffer


def _whole_gradients(chunks: Sequence[nn.Module]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield trained parameters and their gradients, of which the distributed optimizer leaves each replica a part."""
    for chunk in chunks:
        groups: list[Any] = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]  # type: ignore[misc]
        for bucket_group in groups:
            for bucket in bucket_group.buckets:
                whole = bucket.grad_data
                if chunk.ddp_config.use_distributed_optimizer:  # type: ignore[union-attr]
                    ranks = bucket_group.intra_distributed_optimizer_instance_group
                    whole = torch.empty_like(bucket.grad_data)
                    dist.all_gather_into_tensor(whole, bucket.grad_data.chunk(ranks.size())[ranks.rank()], group=ranks)
                for parameter in bucket.params_list:
                    start, end = bucket.param_to_index[parameter]
                    yield parameter, whole[start:end].view(parameter.shape)
