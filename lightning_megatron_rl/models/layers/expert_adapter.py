"""The adapter of one linear layer of an expert, split like the layer over the expert tensor-parallel ranks.

Megatron-Bridge 0.6.2 has one for dense layers only: on experts, whose layers leave all communication to the token
dispatcher, the parts of its product are not added up, and the gradient of what it gathers is not summed.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn


class ExpertAdapter(nn.Module):
    """Adds ``alpha / rank * B A x`` to `linear_fc1` or `linear_fc2` of an expert.

    The dispatcher gives all expert tensor-parallel ranks the same tokens and adds up what they return. So the first
    layer's input is whole, and the second's output a part of a sum::

        linear_fc1   x [tokens, in]          A [rank / etp, in]   gather A x    B [out / etp, rank]
        linear_fc2   x [tokens, in / etp]    A [rank, in / etp]   sum and split A x over rank    B [out, rank / etp]

    Args:
        layer: What is adapted: its weight is [out / etp, in] or [out, in / etp].
        name: Its name, with layers and experts counted over the whole model.
        rank: Rows of A; a multiple of the expert tensor-parallel size.
        alpha: The output is multiplied by alpha / rank.
        dropout: Probability of dropping an input of A.
        config: Megatron's `TransformerConfig`.
    """

    base_linear_is_parallel = True  # Megatron-Bridge asks while it lists the adapters of a model

    def __init__(self, layer: Any, name: str, *, rank: int, alpha: float, dropout: float, config: Any) -> None:
        super().__init__()
        from megatron.core import parallel_state

        self.name, self.dim, self.alpha = name, rank, alpha
        self.input_is_parallel = name.endswith(".linear_fc2")
        self.gated = config.gated_linear_unit and not self.input_is_parallel
        self.tp_group = parallel_state.get_expert_tensor_parallel_group()
        size = self.tp_group.size()
        weight: Tensor = layer.weight
        rank_in, rank_out = (rank, rank // size) if self.input_is_parallel else (rank // size, rank)
        self.dropout = nn.Dropout(dropout)
        self.linear_in = _Weight(torch.empty(rank_in, weight.size(1), dtype=weight.dtype, device=weight.device))
        self.linear_out = _Weight(torch.empty(weight.size(0), rank_out, dtype=weight.dtype, device=weight.device))
        for part in (self.linear_in, self.linear_out):
            set_tensor_model_parallel_attributes(part.weight, is_parallel=True, dim=self.split_dimension, stride=1)
            part.weight.allreduce = weight.allreduce  # type: ignore[attr-defined]  # summed over the experts' replicas

    @property
    def split_dimension(self) -> int:
        """The dimension of A and of B that is split over the expert tensor-parallel ranks."""
        return 1 if self.input_is_parallel else 0

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        """Map `tokens` [tokens, in] or [tokens, in / etp] to what is added to the layer's output."""
        hidden = F.linear(self.dropout(tokens), self.linear_in.weight)
        if self.tp_group.size() > 1:
            if self.input_is_parallel:
                hidden = reduce_scatter_last_dim_to_tensor_parallel_region(hidden, self.tp_group)
            else:
                hidden = all_gather_last_dim_from_tensor_parallel_region(hidden, self.tp_group)
        return F.linear(hidden, self.linear_out.weight) * (self.alpha / self.dim)

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of the whole A, [rank, in], and the whole B, [out, rank]."""
        (_, features_in), (features_out, _) = self.linear_in.weight.shape, self.linear_out.weight.shape
        size = self.tp_group.size()
        if self.input_is_parallel:
            return (self.dim, features_in * size), (features_out, self.dim)
        return (self.dim, features_in), (features_out * size, self.dim)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of A and B."""
        return self.linear_in.weight.dtype

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [out, rank]; a collective of the expert tensor-parallel ranks."""
        a, b = (gather(part.weight, self.split_dimension, self.tp_group) for part in (self.linear_in, self.linear_out))
        if self.gated:  # each rank has rows of the gate, then rows of what it gates
            b = b.unflatten(0, (self.tp_group.size(), 2, -1)).transpose(0, 1).flatten(0, 2)
        return a, b

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """This rank's parts, for Megatron's distributed checkpoints; the layer of experts adds who else has them."""
        assert metadata is not None  # from the layer of experts
        state = {"linear_in.weight": self.linear_in.weight, "linear_out.weight": self.linear_out.weight}
        sharded = make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            dict.fromkeys(state, self.split_dimension),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.gated:
            key = f"{prefix}linear_out.weight"
            sharded[key] = apply_swiglu_sharded_factory(sharded[key], sharded_offsets)
        return sharded


class _Weight(nn.Module):
    """A matrix under the name that Megatron-Bridge's adapters have for it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


@torch.no_grad()
def gather(tensor: Tensor, dimension: int, group: Any) -> Tensor:
    """Concatenate the parts of `tensor` that the ranks of `group` hold along `dimension`."""
    if group.size() == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dimension)
