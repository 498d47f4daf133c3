"""One forward pass of a model chunk over a padded or a packed micro-batch."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_megatron_rl.compat.packed_rope import install_packed_rope


def microbatch_forward(
    chunk: torch.nn.Module,
    tokens: Tensor,
    position_ids: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    *,
    output_processor: Callable[..., Tensor],
) -> Tensor:
    """Run `chunk` (bare, or wrapped by `Float16Module` or DDP) on `tokens`, `position_ids`, `labels`, each [b, s].

    Sequences of a padded batch are padded on the right. A packed batch has b = 1; `cu_seqlens` (int32, [sequences + 1],
    on the CPU: reading it must not wait for the GPU) holds the boundaries of its sequences, which do not see each
    other, and `max_seqlen` the length of the longest; under context parallelism they count whole sequences, of which
    this rank's tokens are the zigzag share.
    The last pipeline stage returns what `output_processor` returns, the others their hidden states.

    Raises `ValueError` if the boundaries do not fit the tokens, or the tokens cannot be split for sequence parallelism.

    Example:
        Two packed sequences of 3 and 2 tokens: ``tokens`` [1, 5], ``cu_seqlens = [0, 3, 5]``, ``max_seqlen = 3``.
    """
    from megatron.core.utils import get_model_config

    config = get_model_config(chunk)
    length = tokens.size(1)
    if config.sequence_parallel and length % config.tensor_model_parallel_size:
        raise ValueError(
            f"sequence_parallel splits the tokens of a micro-batch over the tensor-parallel ranks, but "
            f"{length} % {config.tensor_model_parallel_size} = {length % config.tensor_model_parallel_size}: "
            f"pad the micro-batch to a multiple of {config.tensor_model_parallel_size} tokens"
        )
    packed_seq_params = None
    if cu_seqlens is not None:
        install_packed_rope()
        _check_boundaries(cu_seqlens, max_seqlen, length * config.context_parallel_size)
        packed_seq_params = _packed_seq_params(cu_seqlens.to(tokens.device, non_blocking=True), max_seqlen)
    return chunk(
        tokens,
        position_ids,
        None,
        labels=labels,
        packed_seq_params=packed_seq_params,
        output_processor=output_processor,
    )


def _check_boundaries(cu_seqlens: Tensor, max_seqlen: int | None, length: int) -> None:
    """Refuse boundaries that do not describe a packed batch of `length` tokens on all context-parallel ranks together.

    Raises:
        ValueError: They end elsewhere, or the longest sequence is another.
    """
    boundaries = cu_seqlens.tolist()
    longest = max(end - start for start, end in pairwise(boundaries))
    if boundaries[0] != 0 or boundaries[-1] != length:
        raise ValueError(
            f"cu_seqlens runs from {boundaries[0]} to {boundaries[-1]}, but the packed micro-batch has {length} "
            "tokens: it must start at 0 and end there (padding at the end is a sequence of its own)"
        )
    if max_seqlen != longest:
        # Megatron reads a longest sequence as long as the whole batch as "positions do not restart"
        raise ValueError(f"max_seqlen={max_seqlen}, but the longest sequence of cu_seqlens has {longest} tokens")


def _packed_seq_params(cu_seqlens: Tensor, max_seqlen: int | None) -> Any:
    """Megatron's description of a packed batch."""
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
    )
