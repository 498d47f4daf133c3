"""Gradients of expert biases that Megatron adds up twice.

Under sequence parallelism the ranks of a tensor-parallel group compute different tokens, so what all of them hold whole
has its gradient summed over the group. Megatron marks the bias of a row-parallel layer for that (megatron-core 0.19.2),
also in experts that are not split (`expert_tensor_parallel_size` 1): their gradients are summed over the same ranks as
those of replicas already, and the bias's comes out times the group's size. The loss is right; the next one is not.
"""

from collections.abc import Iterable

from torch import nn

_EXPERTS = ".experts."


def sum_expert_biases_once(chunks: Iterable[nn.Module]) -> None:
    """Leave the gradients of experts to the reduction over their replicas.

    Args:
        chunks: Model chunks, before they are wrapped for training.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if _EXPERTS in name and getattr(parameter, "sequence_parallel", False):
                parameter.sequence_parallel = False  # type: ignore[attr-defined]
