"""Causal attention within segments, called as FlashAttention's kernels for sequences of different lengths are."""

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """Attend within segments, whose queries are the last of their keys' positions; arguments as flash attention's.

    Raises:
        ValueError: It is not plain causal attention.
    """
    if not causal or window_size != (-1, -1):
        raise ValueError(f"causal={causal}, window_size={window_size}: plain causal attention is meant")
    if query.is_cuda:
        packed = (query, key, value, starts_q, starts_k, longest_q, longest_k)
        return varlen_attn(*packed, scale=softmax_scale, window_size=(-1, 0))
    parts = []
    for first_q, last_q, first_k, last_k in zip(
        starts_q[:-1].tolist(), starts_q[1:].tolist(), starts_k[:-1].tolist(), starts_k[1:].tolist(), strict=True
    ):
        count_q, count_k = last_q - first_q, last_k - first_k
        mask = torch.ones(count_q, count_k, dtype=torch.bool).tril(count_k - count_q)
        q, k, v = (x.transpose(0, 1) for x in (query[first_q:last_q], key[first_k:last_k], value[first_k:last_k]))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)
