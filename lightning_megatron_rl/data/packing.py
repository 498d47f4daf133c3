"""Packing: sequences into micro-batches of at most so many tokens, and per-token results back to their sequences."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class TokenSequence:
    """One sequence to score or to train on.

    Raises:
        ValueError: if shapes differ, the sequence is empty, or its first token, which nothing predicts, is a target.

    Example:
        ``TokenSequence(torch.tensor([5, 9, 7]), torch.tensor([False, False, True]))`` trains on the last token only.
    """

    token_ids: Tensor  # [n] int64
    loss_mask: Tensor  # [n] bool, True where the token AT this position is a target
    fields: dict[str, Tensor] = field(default_factory=dict)  # name -> [n] float, aligned with token_ids

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        if len(shape) != 1 or shape[0] == 0:
            raise ValueError(f"token_ids has shape {list(shape)}; a sequence is one-dimensional and not empty")
        for name, values in {"loss_mask": self.loss_mask, **self.fields}.items():
            if values.shape != shape:
                raise ValueError(
                    f"{name} has shape {list(values.shape)}, token_ids has {list(shape)}: they must be equal"
                )
        if self.loss_mask[0]:
            raise ValueError("loss_mask[0] is True, but nothing predicts the first token: set it to False")

    def __len__(self) -> int:
        return self.token_ids.shape[0]


@dataclass
class MicroBatch:
    """What one forward pass takes: `b` rows of `s` positions; packed, `b` is 1 and `cu_seqlens` marks the sequences.

    Everything but `tokens` is aligned with `labels`: position `t` of a sequence belongs to the prediction of `t + 1`.
    """

    tokens: Tensor  # [b, s] int64, 0 on padding
    labels: Tensor  # [b, s] int64, the next token of the same sequence, 0 where there is none
    position_ids: Tensor  # [b, s] int64, restarts at 0 for every sequence
    mask: Tensor  # [b, s] bool, the label at this position counts
    sequence_index: Tensor  # [b, s] int64, index into the list given to `make_microbatches`, -1 on padding
    fields: dict[str, Tensor]  # name -> [b, s], 0 where there is no label
    cu_seqlens: Tensor | None  # [segments + 1] int32 when packed (padding is a segment of its own), None when padded
    max_seqlen: int  # tokens of the longest segment

    def to(self, device: torch.device | str) -> "MicroBatch":
        """A copy whose tensors live on `device`."""
        return MicroBatch(
            tokens=self.tokens.to(device),
            labels=self.labels.to(device),
            position_ids=self.position_ids.to(device),
            mask=self.mask.to(device),
            sequence_index=self.sequence_index.to(device),
            fields={name: values.to(device) for name, values in self.fields.items()},
            cu_seqlens=None if self.cu_seqlens is None else self.cu_seqlens.to(device),
            max_seqlen=self.max_seqlen,
        )


def plan_microbatches(
    lengths: Sequence[int], max_tokens: int, *, packed: bool = True, num_microbatches: int | None = None
) -> list[list[int]]:
    """Share sequences out to bins of at most `max_tokens` tokens, few and evenly filled; the same input, the same plan.

    Args:
        lengths: Tokens of each sequence.
        max_tokens: Most tokens of a bin: the sum of its lengths when packed, number times longest when padded.
        packed: Whether the sequences will be packed or padded.
        num_microbatches: Make at least this many bins, for data-parallel ranks that must agree; the last may be empty.
            Asking for at least as many as the plan without it has gives exactly that number.

    Returns:
        The indices of each bin, ascending.

    Raises:
        ValueError: if one sequence alone is longer than `max_tokens`.

    Example:
        ``plan_microbatches([5, 3, 4], max_tokens=8)`` is ``[[0], [1, 2]]``.
    """
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"sequence {index} has {length} tokens, which is more than max_tokens_per_microbatch={max_tokens}: "
                f"raise it to at least {length}, or shorten prompts or responses"
            )
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    fill = _fill_packed if packed else _fill_padded
    bins = fill(lengths, longest_first, max_tokens, num_microbatches or 0)
    bins += [[] for _ in range((num_microbatches or 0) - len(bins))]
    return [sorted(bin_) for bin_ in bins]


def make_microbatches(
    sequences: Sequence[TokenSequence], plan: Sequence[Sequence[int]], *, packed: bool = True, pad_to_multiple: int = 1
) -> list[MicroBatch]:
    """Lay sequences out as `plan` says, each shifted on its own so that none predicts a token of its neighbour.

    Args:
        sequences: What to lay out; all have the same field names.
        plan: The bins of `plan_microbatches`; an empty bin becomes a micro-batch of padding.
        packed: One row of sequences end to end, or one row per sequence with padding on the right.
        pad_to_multiple: Row lengths are padded to a multiple of this (sequence parallelism: of the TP size).

    Raises:
        ValueError: if field names differ between sequences.

    Example:
        Token ids 5 6 and 7 8 9 packed with ``pad_to_multiple=4``: tokens 5 6 7 8 9 0 0 0, labels 6 0 8 9 0 0 0 0,
        position ids 0 1 0 1 2 0 1 2, ``cu_seqlens`` 0 2 5 8.
    """
    names = list(sequences[0].fields) if sequences else []
    for index, sequence in enumerate(sequences):
        if set(sequence.fields) != set(names):
            raise ValueError(
                f"sequence {index} has fields {sorted(sequence.fields)}, sequence 0 has {sorted(names)}: "
                f"all sequences of a batch need the same fields"
            )
    lay_out = _lay_out_packed if packed else _lay_out_padded
    return [lay_out(sequences, list(bin_), names, pad_to_multiple) for bin_ in plan]


def scatter_to_sequences(
    values: Sequence[Tensor], microbatches: Sequence[MicroBatch], sequences: Sequence[TokenSequence]
) -> list[Tensor]:
    """Undo the layout: per-token outputs of micro-batches back to one tensor per sequence.

    Args:
        values: `[b, s]` of each micro-batch, aligned with its labels (log-probs, entropies).
        microbatches: What `make_microbatches` gave.
        sequences: What `make_microbatches` was given.

    Returns:
        `[n]` per sequence, aligned with `token_ids`: position `t` holds the value of token `t`; position 0, which
        nothing predicts, is 0.

    Example:
        For token ids 5 6 7 and values a b c at their positions the result is 0 a b.
    """
    if not sequences:
        return []
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=values[0].device)
    offsets = lengths.cumsum(0) - lengths
    flat = values[0].new_zeros(int(lengths.sum()))
    for output, microbatch in zip(values, microbatches, strict=True):
        owner = microbatch.sequence_index.to(output.device)
        token = microbatch.position_ids.to(output.device) + 1  # position of the label in its own sequence
        has_label = (owner >= 0) & (token < lengths[owner])
        flat[(offsets[owner] + token)[has_label]] = output[has_label]
    return list(flat.split(lengths.tolist()))


def padding_fraction(microbatches: Sequence[MicroBatch]) -> float:
    """Share of all positions that hold padding, 0 to 1.

    Example:
        Sequences of 2 and 4 tokens padded to 4 waste 2 of 8 positions: 0.25.
    """
    positions = sum(microbatch.tokens.numel() for microbatch in microbatches)
    padding = sum(int((microbatch.sequence_index < 0).sum()) for microbatch in microbatches)
    return padding / positions if positions else 0.0


def _fill_packed(lengths: Sequence[int], longest_first: list[int], max_tokens: int, at_least: int) -> list[list[int]]:
    """Longest first into the emptiest bin; a sequence that does not fit there fits nowhere and opens a bin.

    Repeated with the number of bins it took, until that number suffices: the bins are then evenly filled. More bins
    never make the fullest bin fuller, so any larger number is met exactly.
    """
    num_bins = max(-(-sum(lengths) // max_tokens), at_least)
    while True:
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        emptiest = [(0, number) for number in range(num_bins)]
        for index in longest_first:
            if not emptiest or emptiest[0][0] + lengths[index] > max_tokens:
                heapq.heappush(emptiest, (0, len(bins)))
                bins.append([])
            tokens, number = heapq.heappop(emptiest)
            bins[number].append(index)
            heapq.heappush(emptiest, (tokens + lengths[index], number))
        if len(bins) == num_bins:
            return bins
        num_bins = len(bins)


def _fill_padded(lengths: Sequence[int], longest_first: list[int], max_tokens: int, at_least: int) -> list[list[int]]:
    """Neighbours in length share a bin, which wastes least; then the smallest limit that needs no more bins.

    In descending order the first sequence of a bin is its longest, and filling in order needs the fewest bins.
    """

    def cut(limit: int) -> list[list[int]]:
        bins: list[list[int]] = []
        for index in longest_first:
            if not bins or (len(bins[-1]) + 1) * lengths[bins[-1][0]] > limit:
                bins.append([])
            bins[-1].append(index)
        return bins

    most_bins = max(len(cut(max_tokens)), at_least)
    low, high = max(lengths, default=0), max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(cut(middle)) <= most_bins:
            high = middle
        else:
            low = middle + 1
    return cut(high)


def _round_up(length: int, multiple: int) -> int:
    """The smallest multiple that is not 0 and holds `length`."""
    return max(-(-length // multiple), 1) * multiple


def _shift(values: Tensor) -> Tensor:
    """`[n]` aligned with tokens to `[n]` aligned with labels; the last position has no label."""
    return torch.cat([values[1:], values.new_zeros(1)])


def _pad(values: Tensor, length: int, fill: int = 0) -> Tensor:
    """`[n]` padded on the right to `[length]`."""
    return torch.nn.functional.pad(values, (0, length - values.shape[0]), value=fill)


def _lay_out_packed(
    sequences: Sequence[TokenSequence], bin_: list[int], names: list[str], pad_to_multiple: int
) -> MicroBatch:
    lengths = [len(sequences[index]) for index in bin_]
    total = sum(lengths)
    width = _round_up(total, pad_to_multiple)
    segments = lengths + ([width - total] if width > total else [])

    def join(parts: list[Tensor], dtype: torch.dtype, fill: int = 0) -> Tensor:
        return _pad(torch.cat([torch.empty(0, dtype=dtype), *parts]), width, fill)[None]

    owners = torch.repeat_interleave(torch.tensor(bin_, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64))
    return MicroBatch(
        tokens=join([sequences[index].token_ids for index in bin_], torch.int64),
        labels=join([_shift(sequences[index].token_ids) for index in bin_], torch.int64),
        position_ids=torch.cat([torch.arange(length) for length in segments])[None],
        mask=join([_shift(sequences[index].loss_mask) for index in bin_], torch.bool),
        sequence_index=join([owners], torch.int64, fill=-1),
        fields={
            name: join([_shift(sequences[index].fields[name]) for index in bin_], sequences[0].fields[name].dtype)
            for name in names
        },
        cu_seqlens=_pad_front(torch.tensor(segments).cumsum(0)).to(torch.int32),
        max_seqlen=max(segments),
    )


def _pad_front(values: Tensor) -> Tensor:
    """`[n]` with a 0 put before it."""
    return torch.nn.functional.pad(values, (1, 0))


def _lay_out_padded(
    sequences: Sequence[TokenSequence], bin_: list[int], names: list[str], pad_to_multiple: int
) -> MicroBatch:
    width = _round_up(max((len(sequences[index]) for index in bin_), default=0), pad_to_multiple)

    def stack(rows: list[Tensor], dtype: torch.dtype, fill: int = 0) -> Tensor:
        padded = [_pad(row, width, fill) for row in rows]
        return torch.stack(padded) if padded else torch.full((1, width), fill, dtype=dtype)

    owners = [torch.full((len(sequences[index]),), index, dtype=torch.int64) for index in bin_]
    return MicroBatch(
        tokens=stack([sequences[index].token_ids for index in bin_], torch.int64),
        labels=stack([_shift(sequences[index].token_ids) for index in bin_], torch.int64),
        position_ids=torch.arange(width).repeat(max(len(bin_), 1), 1),
        mask=stack([_shift(sequences[index].loss_mask) for index in bin_], torch.bool),
        sequence_index=stack(owners, torch.int64, fill=-1),
        fields={
            name: stack([_shift(sequences[index].fields[name]) for index in bin_], sequences[0].fields[name].dtype)
            for name in names
        },
        cu_seqlens=None,
        max_seqlen=width,
    )
