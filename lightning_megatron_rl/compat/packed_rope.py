"""Rotary embeddings of packed sequences without a loop over the sequences.

Without Transformer Engine's fused kernel (`apply_rope_fusion`) Megatron rotates one sequence after the other, in every
layer, queries and keys (megatron-core 0.19.2): a dozen kernels each, so that a batch of many short sequences spends
its time launching them, and one wait for the GPU per call. Here every token looks up its own position: the same
numbers, bit for bit, in as many operations for a thousand sequences as for one. It serves the layers of Transformer
Engine and latent attention; the other torch layers lay their angles out like the tokens (`torch_backend`).
"""

import functools
from typing import Any

import torch
from torch import Tensor


@functools.cache
def install_packed_rope() -> None:
    """Let Megatron rotate packed sequences all at once; later calls do nothing."""
    from megatron.core.models.common.embeddings import rope_utils

    original = rope_utils._apply_rotary_pos_emb_thd
    rotate = rope_utils._apply_rotary_pos_emb_bshd

    @functools.wraps(original)
    def rotate_packed(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *, cp_group: Any, **options: Any) -> Tensor:
        if freqs.size(0) == t.size(0) * cp_group.size():  # one sequence, or positions of the whole batch
            return original(t, cu_seqlens, freqs, cp_group=cp_group, **options)
        positions = token_positions(cu_seqlens, t.size(0), cp_group.size(), cp_group.rank())
        return rotate(t.unsqueeze(1), freqs.index_select(0, positions), **options).squeeze(1)

    rope_utils._apply_rotary_pos_emb_thd = rotate_packed


def token_positions(cu_seqlens: Tensor, num_tokens: int, cp_size: int = 1, cp_rank: int = 0) -> Tensor:
    """Return the position of each of a rank's tokens in its own sequence, int64 [num_tokens].

    Args:
        cu_seqlens: Boundaries of the whole sequences, ``[sequences + 1]``.
        num_tokens: Tokens on this rank.
        cp_size: Ranks that share each sequence: of its 2 · `cp_size` equal parts a rank has one from the front and
            its mirror image from the back.
        cp_rank: This rank among them.

    Example:
        Sequences of 3 and 2 tokens, ``cu_seqlens = [0, 3, 5]``: ``[0, 1, 2, 0, 1]``.
    """
    boundaries = cu_seqlens.long() // cp_size
    index = torch.arange(num_tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(boundaries[1:].contiguous(), index, right=True)
    start = boundaries[sequence]
    offset = index - start
    if cp_size == 1:
        return offset
    length = boundaries[sequence + 1] - start
    half = length // 2
    behind = cp_size * length - (cp_rank + 1) * half + offset - half
    return torch.where(offset < half, cp_rank * half + offset, behind)
