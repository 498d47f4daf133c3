"""A value head: one number per token in the place of the output layer's logits.

The weight is whole on every tensor-parallel rank of the last pipeline stage. Under sequence parallelism each of them
sees a part of the tokens, so its gradients are summed over them, like those of norms; otherwise each computes the same.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_SEED = 20_171  # of a new head: every rank draws the same one


class ValueHead(nn.Module):
    """hidden states ``[s, b, h]`` -> values ``[b, s]`` in fp32.

    Args:
        weight: ``[1, h]``.
        sequence_parallel: Whether a tensor-parallel rank's hidden states are of a part of the tokens.
        tp_group: The tensor-parallel ranks.

    Example:
        ``ValueHead(torch.ones(1, 64), sequence_parallel=False, tp_group=None)(hidden).shape == (b, s)``
    """

    def __init__(self, weight: Tensor, *, sequence_parallel: bool, tp_group: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]  # finalize_model_grads reads it
        self.sequence_parallel = sequence_parallel
        self.tp_group = tp_group

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the values of all tokens of the micro-batch."""
        values = hidden_states.float() @ self.weight.float().T  # [s, b, 1]
        if self.sequence_parallel:
            from megatron.core.tensor_parallel import mappings

            # the loss is the same on all ranks: each takes its own part of its gradient, nothing is summed
            values = mappings.gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values[..., 0].transpose(0, 1)


def value_processor() -> Callable[..., Tensor]:
    """An `output_processor` for Megatron's `GPTModel.forward` whose output layer is a `ValueHead`: fp32 ``[1, b, s]``.

    The value at a position sees the tokens up to it; aligned with labels, it is that of the state in which the next
    token is chosen.
    """

    def process(*, hidden_states: Tensor, output_layer: ValueHead, **unused: Any) -> Tensor:
        return output_layer(hidden_states)[None]

    return process


def new_weight(hidden_size: int) -> Tensor:
    """Return the weight of a new head, ``[1, hidden_size]``: normal with variance 1 / (hidden_size + 1).

    As in Stiennon et al., arXiv:2009.01325. The same on every rank and in every run.
    """
    generator = torch.Generator().manual_seed(_SEED)
    # Lightning builds the model with its GPU as the default device, and a CPU generator draws on the CPU alone
    return torch.randn(1, hidden_size, generator=generator, device="cpu") / math.sqrt(hidden_size + 1)


def untie_output_layer(chunk: Any) -> None:
    """Let a bare, loaded chunk forget that its output layer has the embedding's weight.

    Otherwise the first and the last pipeline stage would sum the gradients of the embedding and of the head.
    """
    chunk.share_embeddings_and_output_weights = False
    chunk.config.share_embeddings_and_output_weights = False  # Megatron-Bridge looks here
    if chunk.pre_process:
        chunk.embedding.word_embeddings.weight.shared_embedding = False


def put_value_head(chunk: Any, weight: Tensor) -> None:
    """Replace the output layer of a bare, untied chunk of the last pipeline stage, on its device and in its dtype.

    Args:
        chunk: A Megatron `GPTModel`.
        weight: ``[1, hidden]``.
    """
    old = next(chunk.decoder.parameters())
    chunk.output_layer = ValueHead(
        weight.to(device=old.device, dtype=old.dtype, copy=True),
        sequence_parallel=chunk.config.sequence_parallel,
        tp_group=chunk.pg_collection.tp,
    )
