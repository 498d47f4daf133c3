"""Causal attention in plain torch over dense and packed batches, also with the sequence split over context parallelism.

Packed sequences are cut out, batched with others of like length and attended to without a mask: padding on the right of
a causal sequence is never seen by its tokens.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

SMALLEST_BUCKET = 32  # tokens; shorter sequences share a batch: a call costs more than their padding


@dataclass(frozen=True)
class Softmax:
    """How scores become weights: softmax of `scale` times q k^T over the keys that a query sees.

    A query sees the last `window` tokens up to its own, or all (None). `sink` [heads] is a learned score that takes
    part in the softmax and brings no value. `cap` bounds scores s softly, as cap tanh(s / cap) (Gemma 2, 2024).
    """

    scale: float
    dropout: float = 0.0
    window: int | None = None  # tokens
    sink: Tensor | None = None
    cap: float | None = None

    @property
    def needs_mask(self) -> bool:
        """Whether torch's causal kernels cannot compute it."""
        return self.sink is not None or self.cap is not None


@dataclass(frozen=True)
class _Buckets:
    """How packed tokens are laid out as a few right-padded batches, and where each token is found again."""

    shapes: list[tuple[int, int]]  # sequences, padded length of each batch
    gather: Tensor  # [sum of sequences x padded length] token behind each slot; padding repeats a sequence's last token
    restore: Tensor  # [tokens] slot of each token


def dense_attention(query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
    """Causal attention: [s, b, heads, d] for `query` like it and `key`, `value` [s, b, groups, d].

    Example:
        With one token and no sink, the result is `value`, repeated for the heads of each group.
    """
    length = query.size(0)
    cut = softmax.window is not None and softmax.window < length
    if not cut and not softmax.needs_mask:
        return _attend(query, key, value, None, softmax)
    positions = torch.arange(length, device=query.device)
    return _attend(query, key, value, _visible(positions, positions, softmax.window), softmax)


def _visible(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Which keys of a sequence its queries see, [queries, keys]."""
    distance = query_positions[:, None] - key_positions[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, softmax: Softmax) -> Tensor:
    """Attention of `query` [q, b, heads, d] to `key`, `value` [k, b, groups, d] by mask `visible`; None means causal.

    Of a sequence's last queries, `causal_lower_right` means causal.

    A sink is one more key at the end, whose score does not depend on the query and whose value is zero.
    """
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    if softmax.cap is not None:
        assert isinstance(visible, Tensor)
        return _attend_capped(query, key, value, visible, softmax, softmax.cap).permute(2, 0, 1, 3)
    mask = visible
    if softmax.sink is not None:
        assert visible is not None
        shape = (len(softmax.sink), query.size(2))  # heads, queries
        hidden = query.new_zeros(visible.shape).masked_fill(~visible, -torch.inf)
        sink = softmax.sink.to(query.dtype)[:, None, None].expand(*shape, 1)
        mask = torch.cat([hidden.expand(shape[0], -1, -1), sink], dim=-1)[None]
        key, value = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=softmax.scale,
        dropout_p=softmax.dropout,
        enable_gqa=query.size(1) != key.size(1),
    )
    return out.permute(2, 0, 1, 3)


def _attend_capped(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, softmax: Softmax, cap: float) -> Tensor:
    """Attention with soft-capped scores, written out: [b, heads, q, d] for `query` like it."""
    repeats = query.size(1) // key.size(1)
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    scores = cap * torch.tanh(softmax.scale * (query @ key.transpose(-1, -2)) / cap)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
    return F.dropout(weights, softmax.dropout) @ value


def packed_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, softmax: Softmax) -> Tensor:
    """`dense_attention` within each of the sequences `cu_seqlens` [sequences + 1] marks in [tokens, heads, d] tensors.

    Example:
        ``cu_seqlens = [0, 3, 5]``: tokens 0 to 2 see each other, and so do tokens 3 and 4.
    """
    lengths = tuple(end - start for start, end in pairwise(cu_seqlens.tolist()))
    if len(set(lengths)) == 1:
        shape = (len(lengths), lengths[0])
        q, k, v = (tensor.unflatten(0, shape).transpose(0, 1) for tensor in (query, key, value))
        return dense_attention(q, k, v, softmax).transpose(0, 1).flatten(0, 1)
    buckets = _buckets(lengths, query.device)
    gathered = [tensor[buckets.gather] for tensor in (query, key, value)]
    outs = []
    start = 0
    for sequences, length in buckets.shapes:
        stop = start + sequences * length
        q, k, v = (tensor[start:stop].unflatten(0, (sequences, length)).transpose(0, 1) for tensor in gathered)
        out = dense_attention(q, k, v, softmax)  # [length, sequences, heads, d]
        outs.append(out.transpose(0, 1).flatten(0, 1))
        start = stop
    return torch.cat(outs)[buckets.restore]


@lru_cache(maxsize=32)  # every layer of a micro-batch asks for the same one
def _buckets(lengths: tuple[int, ...], device: torch.device) -> _Buckets:
    """Batch sequences of `lengths` whose padded lengths agree to within a factor of two."""
    buckets: dict[int, list[tuple[int, int]]] = {}  # power of two -> (start, length) of its sequences
    start = 0
    for length in lengths:
        if length:
            buckets.setdefault(max(length, SMALLEST_BUCKET).bit_length(), []).append((start, length))
        start += length
    shapes = []
    gather = []
    restore = torch.empty(start, dtype=torch.int64)
    slot = 0
    for sequences in buckets.values():
        longest = max(length for _, length in sequences)
        shapes.append((len(sequences), longest))
        for first, length in sequences:
            gather.append(first + torch.arange(longest).clamp(max=length - 1))
            restore[first : first + length] = torch.arange(slot, slot + length)
            slot += longest
    return _Buckets(shapes, torch.cat(gather).to(device), restore.to(device))


@lru_cache(maxsize=32)  # every layer of a micro-batch asks for the same one
def packed_positions(boundaries: tuple[int, ...], cp_size: int, cp_rank: int, device: torch.device) -> Tensor:
    """Position of each token within its own packed sequence, for the tokens that this context-parallel rank holds.

    Example:
        ``packed_positions((0, 3, 5), 1, 0, device) == [0, 1, 2, 0, 1]``.
    """
    lengths = [end - start for start, end in pairwise(boundaries)]
    if cp_size == 1:
        return torch.cat([torch.arange(length) for length in lengths]).to(device)
    return torch.cat([zigzag_positions(length, cp_size, cp_rank) for length in lengths]).to(device)


def zigzag_positions(length: int, cp_size: int, cp_rank: int) -> Tensor:
    """Positions of a sequence of `length` that context-parallel rank `cp_rank` holds, [length / cp_size].

    The sequence is cut in 2 x cp_size chunks; rank r holds chunks r and 2 x cp_size - 1 - r, so that the causal work is
    even. Example: ``zigzag_positions(8, 2, 0) == [0, 1, 6, 7]``.
    """
    chunk = length // (2 * cp_size)
    positions = torch.arange(chunk)
    return torch.cat([positions + cp_rank * chunk, positions + (2 * cp_size - 1 - cp_rank) * chunk])


def zigzag_attention(query: Tensor, key: Tensor, value: Tensor, cp_rank: int, softmax: Softmax) -> Tensor:
    """`dense_attention` of this rank's `query` [s / cp, b, heads, d] to all `key`, `value` [cp, s / cp, b, groups, d].

    Keys and values come in the order of the ranks that hold them, as an all-gather leaves them.
    """
    cp_size = key.size(0)
    length = query.size(0) * cp_size
    if not softmax.needs_mask and (softmax.window is None or softmax.window >= length):
        return _chunks_attention(query, key, value, cp_rank, softmax)
    query_positions = zigzag_positions(length, cp_size, cp_rank)
    key_positions = torch.cat([zigzag_positions(length, cp_size, rank) for rank in range(cp_size)])
    visible = _visible(query_positions, key_positions, softmax.window).to(query.device)
    return _attend(query, key.flatten(0, 1), value.flatten(0, 1), visible, softmax)


def _chunks_attention(query: Tensor, key: Tensor, value: Tensor, cp_rank: int, softmax: Softmax) -> Tensor:
    """Each of this rank's two chunks sees the keys up to its own end, so torch's flash kernels need no mask."""
    cp_size, chunk = key.size(0), query.size(0) // 2
    # rank r holds chunks r and 2 x cp_size - 1 - r: the first halves in order, then the second ones from the end
    key, value = (torch.cat([tensor[:, :chunk], tensor[:, chunk:].flip(0)]).flatten(0, 1) for tensor in (key, value))
    outs = []
    for part, number in enumerate((cp_rank, 2 * cp_size - 1 - cp_rank)):
        end = (number + 1) * chunk
        rows = query[part * chunk : (part + 1) * chunk]
        outs.append(_attend(rows, key[:end], value[:end], causal_lower_right(chunk, end), softmax))
    return torch.cat(outs)


def packed_zigzag_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, cp_rank: int, softmax: Softmax
) -> Tensor:
    """`zigzag_attention` within each packed sequence; `cu_seqlens` counts whole sequences, the tensors hold shares.

    `query` is [tokens / cp, heads, d], `key` and `value` are [cp, tokens / cp, groups, d].
    """
    cp_size = key.size(0)
    boundaries = [boundary // cp_size for boundary in cu_seqlens.tolist()]
    outs = [
        zigzag_attention(query[start:end, None], key[:, start:end, None], value[:, start:end, None], cp_rank, softmax)
        for start, end in pairwise(boundaries)
        if end > start
    ]
    return torch.cat(outs).squeeze(1)
