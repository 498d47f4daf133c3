"""Micro-batches: sequences packed or padded into rows, shared out to context-parallel ranks, and results put back."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_megatron_rl.data.planning import MicroBatchRules, microbatch_shapes
from lightning_megatron_rl.models.layers.packed_attention import zigzag_positions


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
    routing: Tensor | None = None  # [n, expert layers of this pipeline stage, topk] experts to replay, as token_ids
    origin: str = ""  # where it comes from, for messages, e.g. "train row 7"

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        if len(shape) != 1 or shape[0] == 0:
            raise ValueError(f"token_ids has shape {list(shape)}; a sequence is one-dimensional and not empty")
        for name, values in {"loss_mask": self.loss_mask, **self.fields}.items():
            if values.shape != shape:
                raise ValueError(
                    f"{name} has shape {list(values.shape)}, token_ids has {list(shape)}: they must be equal"
                )
        if self.routing is not None and self.routing.shape[0] != len(self):
            raise ValueError(
                f"routing has shape {list(self.routing.shape)}, the sequence {len(self)} tokens: it names each token's"
                " experts, [tokens, expert layers, topk]"
            )
        if self.loss_mask[0]:
            raise ValueError("loss_mask[0] is True, but nothing predicts the first token. Set it to False")

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
    num_sequences: int  # of the list given to `make_microbatches`: every `sequence_index` is below it

    def to(self, device: torch.device | str) -> "MicroBatch":
        """A copy whose tensors live on `device`, but for the boundaries: every forward pass reads them on the CPU."""
        return MicroBatch(
            tokens=self.tokens.to(device),
            labels=self.labels.to(device),
            position_ids=self.position_ids.to(device),
            mask=self.mask.to(device),
            sequence_index=self.sequence_index.to(device),
            fields={name: values.to(device) for name, values in self.fields.items()},
            cu_seqlens=self.cu_seqlens,
            max_seqlen=self.max_seqlen,
            num_sequences=self.num_sequences,
        )


def make_microbatches(
    sequences: Sequence[TokenSequence],
    plan: Sequence[Sequence[int]],
    *,
    packed: bool = True,
    rules: MicroBatchRules | None = None,
    field_names: Sequence[str] | None = None,
) -> list[MicroBatch]:
    """Lay sequences out as `plan` says, each shifted on its own so that none predicts a token of its neighbour.

    Args:
        sequences: What to lay out; all have the same field names.
        plan: The bins of `plan_microbatches`; an empty bin becomes a micro-batch of padding.
        packed: One row of sequences end to end, or one row per sequence with padding on the right.
        rules: What the layout asks of places, rows and shapes.
        field_names: Fields there would be, for a replica that may have no sequence at all.

    Raises:
        ValueError: if field names differ between sequences.

    Example:
        Token ids 5 6 and 7 8 9 packed with ``row_multiple=4``: tokens 5 6 7 8 9 0 0 0, labels 6 0 8 9 0 0 0 0,
        position ids 0 1 0 1 2 0 1 2, ``cu_seqlens`` 0 2 5 8.
    """
    rules = rules or MicroBatchRules()
    names = list(field_names or (sequences[0].fields if sequences else []))
    for index, sequence in enumerate(sequences):
        if set(sequence.fields) != set(names):
            raise ValueError(
                f"sequence {index} has fields {sorted(sequence.fields)}, sequence 0 has {sorted(names)}: "
                f"all sequences of a batch need the same fields"
            )
    lay_out = _lay_out_packed if packed else _lay_out_padded
    shapes = microbatch_shapes([len(sequence) for sequence in sequences], plan, packed=packed, rules=rules)
    return [lay_out(sequences, list(bin_), names, shape, rules) for bin_, shape in zip(plan, shapes, strict=True)]


def context_parallel_share(microbatch: MicroBatch, cp_size: int, cp_rank: int) -> MicroBatch:
    """Return the positions of a micro-batch that context-parallel rank `cp_rank` of `cp_size` works on, `[b, s / cp]`.

    Each sequence is cut in ``2 x cp_size`` chunks, of which rank r gets the r-th and the r-th last. Labels were shifted
    before, so the last position of a chunk still predicts the first token of the next one. `cu_seqlens` and
    `max_seqlen` go on describing whole sequences.
    """
    if cp_size == 1:
        return microbatch
    boundaries = [0, microbatch.tokens.shape[1]] if microbatch.cu_seqlens is None else microbatch.cu_seqlens.tolist()
    columns = torch.cat(
        [start + zigzag_positions(end - start, cp_size, cp_rank) for start, end in pairwise(boundaries)]
    )
    return replace(
        microbatch,
        tokens=microbatch.tokens[:, columns],
        labels=microbatch.labels[:, columns],
        position_ids=microbatch.position_ids[:, columns],
        mask=microbatch.mask[:, columns],
        sequence_index=microbatch.sequence_index[:, columns],
        fields={name: values[:, columns] for name, values in microbatch.fields.items()},
    )


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
        nothing predicts, is 0, and so are positions that are another context-parallel rank's.

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


def _shift(values: Tensor) -> Tensor:
    """`[n]` aligned with tokens to `[n]` aligned with labels; the last position has no label."""
    return torch.cat([values[1:], values.new_zeros(1)])


def _pad(values: Tensor, length: int) -> Tensor:
    """`[n]` padded with zeros on the right to `[length]`."""
    return torch.nn.functional.pad(values, (0, length - values.shape[0]))


def _lay_out_packed(
    sequences: Sequence[TokenSequence],
    bin_: list[int],
    names: list[str],
    shape: tuple[int, int],
    rules: MicroBatchRules,
) -> MicroBatch:
    width = shape[1]
    lengths = [len(sequences[index]) for index in bin_]
    places = [rules.place(length) for length in lengths]
    segments = places + _padding_segments(width - sum(places), max(places, default=width), rules.sequence_multiple)
    ends = torch.tensor(segments).cumsum(0)

    # a rollout has hundreds of sequences and half a dozen fields: few operations on the whole row, not one for each
    def join(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        placed = [part if place == len(part) else _pad(part, place) for part, place in zip(parts, places, strict=True)]
        return _pad(torch.cat([torch.empty(0, dtype=dtype), *placed]), width)

    def join_shifted(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        row = _shift(join(parts, dtype))
        row[ends[: len(places)] - 1] = 0  # the first token of the neighbour
        return row[None]

    token_ids = [sequences[index].token_ids for index in bin_]
    padding = [-1] * (len(segments) - len(places))
    starts, owners, longest = (
        torch.from_numpy(np.repeat(values, segments))  # torch's own wakes every core for a handful of numbers
        for values in ((ends - torch.tensor(segments)).numpy(), bin_ + padding, lengths + padding)
    )
    positions = torch.arange(width) - starts
    owned = positions < longest
    return MicroBatch(
        tokens=join(token_ids, torch.int64)[None],
        labels=join_shifted(token_ids, torch.int64),
        position_ids=positions[None],
        mask=join_shifted([sequences[index].loss_mask for index in bin_], torch.bool),
        sequence_index=torch.where(owned, owners, -1)[None],
        fields={
            name: join_shifted([sequences[index].fields[name] for index in bin_], _dtype(sequences, name))
            for name in names
        },
        cu_seqlens=torch.nn.functional.pad(ends, (1, 0)).to(torch.int32),
        max_seqlen=max(segments),
        num_sequences=len(sequences),
    )


def _padding_segments(length: int, longest: int, multiple: int) -> list[int]:
    """Cut padding at the end of a row in sequences no longer than the row's own, which attention would pay for."""
    piece = max(longest // multiple * multiple, multiple)
    return [min(piece, length - start) for start in range(0, length, piece)]


def _dtype(sequences: Sequence[TokenSequence], name: str) -> torch.dtype:
    return sequences[0].fields[name].dtype if sequences else torch.float32


def _lay_out_padded(
    sequences: Sequence[TokenSequence],
    bin_: list[int],
    names: list[str],
    shape: tuple[int, int],
    rules: MicroBatchRules,
) -> MicroBatch:
    rows, width = shape

    def stack(parts: list[Tensor], dtype: torch.dtype, fill: int = 0) -> Tensor:
        whole = torch.full((rows, width), fill, dtype=dtype)
        for row, part in enumerate(parts):
            whole[row, : len(part)] = part
        return whole

    return MicroBatch(
        tokens=stack([sequences[index].token_ids for index in bin_], torch.int64),
        labels=stack([_shift(sequences[index].token_ids) for index in bin_], torch.int64),
        position_ids=torch.arange(width).repeat(rows, 1),
        mask=stack([_shift(sequences[index].loss_mask) for index in bin_], torch.bool),
        sequence_index=stack([torch.full((len(sequences[index]),), index) for index in bin_], torch.int64, fill=-1),
        fields={
            name: stack([_shift(sequences[index].fields[name]) for index in bin_], _dtype(sequences, name))
            for name in names
        },
        cu_seqlens=None,
        max_seqlen=width,
        num_sequences=len(sequences),
    )
