"""The padding token's embedding, which the lookup gives no gradient, as `padding_idx` of `torch.nn.Embedding` says.

Transformers passes `pad_token_id` as `padding_idx` in every family. The row is used like any other in the forward pass;
with tied embeddings it still gets the output layer's gradient.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor


def padding_row(config: Any) -> int | None:
    """Return the padding token's row of the embedding; None if the model has no padding token.

    A negative `pad_token_id` counts from the end of the vocabulary, as in `torch.nn.Embedding`.

    Raises:
        ValueError: There is no such row.
    """
    token, size = config.pad_token_id, config.vocab_size
    if token is None:
        return None
    if not -size <= token < size:
        raise ValueError(
            f"pad_token_id={token} with vocab_size={size}: there is no such row in the embedding, and Transformers"
            f" cannot build the model. Set pad_token_id in config.json to a token from 0 to {size - 1}, or to null"
        )
    return int(token) % size


def leave_out_padding(chunks: Iterable[Any], row: int | None) -> None:
    """Keep gradients of the padding token's positions from the embedding of chunks, before they are wrapped.

    Args:
        chunks: Megatron's; of these the first stage's has an embedding.
        row: Of the padding token, see `padding_row`.
    """
    if row is None:
        return
    for chunk in chunks:
        if chunk.pre_process:
            chunk.embedding.word_embeddings.register_forward_hook(partial(_cut_gradient, row))


def _cut_gradient(row: int, module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> None:
    """Zero the gradient of an embedding's output where its input is `row`."""
    if not output.requires_grad:  # frozen, or not asked for
        return
    is_padding = arguments[0] == row  # [b, s]
    if module.reduce_scatter_embeddings:  # the output is [s / tp, b, h]
        ranks, rank = module.tp_group.size(), module.tp_group.rank()
        is_padding = is_padding.transpose(0, 1).chunk(ranks)[rank]
    output.register_hook(lambda gradient: gradient.masked_fill(is_padding[..., None], 0))
