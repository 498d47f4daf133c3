"""Export of adapters: merged into the weights, or alone.

Weights are merged as they are laid out in training, each rank its part, before Megatron-Bridge converts them.
Megatron-Bridge 0.6.2 would merge afterwards, and counts the adapters of experts per rank: those of the first ranks went
into the experts of all.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron_rl.models.layers.expert_adapter import ExpertAdapter, gather


class MergedTasks(Sequence[Any]):
    """Megatron-Bridge's conversion tasks of a model with adapters, as of one without.

    A task's weight is merged when the task is its turn, so that one merged weight exists at a time; a collective of the
    tensor-parallel ranks, which all iterate.
    """

    def __init__(self, tasks: Sequence[Any], chunks: Sequence[nn.Module]) -> None:
        self._tasks = tasks
        self._adapters = {id(wrapper.to_wrap): wrapper.adapter for wrapper in _wrappers(chunks)}

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: Any) -> Any:
        return self._merged(self._tasks[index])

    def __iter__(self) -> Iterator[Any]:
        return map(self._merged, self._tasks)

    def _merged(self, task: Any) -> Any:
        if ".to_wrap." not in task.global_param_name:
            return task
        weight = task.param_weight  # None: of another pipeline stage
        if weight is not None and task.param_name.endswith(".to_wrap.weight"):
            weight = (weight.float() + _update(self._adapters[id(task.megatron_module)])).to(weight.dtype)
        return dataclasses.replace(
            task, global_param_name=task.global_param_name.replace(".to_wrap.", "."), param_weight=weight
        )


def _wrappers(chunks: Sequence[nn.Module]) -> Iterator[Any]:
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, AdapterWrapper):
                yield module


@torch.no_grad()
def _update(adapter: Any) -> Tensor:
    """``alpha / rank * B A`` in fp32, of the shape of this rank's part of the weight."""
    a, b = adapter.linear_in.weight, adapter.linear_out.weight
    if not adapter.input_is_parallel:
        a = gather(a, 0, adapter.tp_group)
    else:
        b = gather(b, 1 if isinstance(adapter, ExpertAdapter) else 0, adapter.tp_group)
    return adapter.alpha / adapter.dim * (b.float() @ a.float())


def dense_adapters(bridge: Any, chunks: Sequence[nn.Module], num_layers: int) -> Iterator[tuple[str, Tensor]]:
    """Yield A and B of all adapters but those of experts, whole, under their names in PEFT; a collective."""
    experts = [f"decoder.layers.{layer}.mlp.experts." for layer in range(num_layers)]
    yield from bridge.export_adapter_weights(chunks, show_progress=False, exclude_adapter_base_prefixes=experts)


@torch.no_grad()
def expert_adapters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, A [rank, in] and B [out, rank] of all experts' adapters to every rank; a collective of the world.

    Layers and experts are counted over the whole model: ``decoder.layers.1.mlp.experts.local_experts.3.linear_fc1``.
    """
    mine = {w.adapter.name: w.adapter for w in _wrappers(chunks) if isinstance(w.adapter, ExpertAdapter)}
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, {name: (adapter.shapes, adapter.dtype) for name, adapter in mine.items()})
    owners = {name: (rank, form) for rank, theirs in reversed([*enumerate(held)]) for name, form in theirs.items()}
    device = next(chunks[0].parameters()).device
    for name, (owner, (shapes, dtype)) in sorted(owners.items()):
        if name in mine:
            pair = [tensor.clone() for tensor in mine[name].whole()]
        else:
            pair = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        for tensor in pair:
            dist.broadcast(tensor, owner)
        yield name, pair[0], pair[1]
