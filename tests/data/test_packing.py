import random

import pytest
import torch

from lightning_megatron_rl.data import (
    MicroBatchRules,
    TokenSequence,
    context_parallel_share,
    make_microbatches,
    padding_fraction,
    plan_microbatches,
    scatter_to_sequences,
)


def make_sequences(lengths: list[int], seed: int = 0) -> list[TokenSequence]:
    """Sequences of distinct non-zero token ids, random targets, and a field that equals the token id."""
    generator = torch.Generator().manual_seed(seed)
    sequences, first = [], 1
    for length in lengths:
        ids = torch.arange(first, first + length)
        mask = torch.rand(length, generator=generator) < 0.6
        mask[0] = False
        sequences.append(TokenSequence(ids, mask, {"advantages": ids.float()}))
        first += length
    return sequences


def test_packed_layout():
    sequences = make_sequences([2, 3])
    sequences[1].loss_mask = torch.tensor([False, True, True])
    (batch,) = make_microbatches(sequences, [[0, 1]], rules=MicroBatchRules(row_multiple=4))
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]
    assert batch.labels.tolist() == [[2, 0, 4, 5, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 0, 1, 2]]
    assert batch.sequence_index.tolist() == [[0, 0, 1, 1, 1, -1, -1, -1]]
    assert batch.mask[0, 2:].tolist() == [True, True, False, False, False, False]
    assert batch.fields["advantages"].tolist() == [[2.0, 0, 4, 5, 0, 0, 0, 0]]
    assert batch.cu_seqlens.tolist() == [0, 2, 5, 8]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 3
    (whole,) = make_microbatches(sequences, [[0, 1]], rules=MicroBatchRules(row_multiple=5))
    assert whole.cu_seqlens.tolist() == [0, 2, 5]  # no padding, no segment for it


def test_padded_layout():
    (batch,) = make_microbatches(make_sequences([2, 3]), [[0, 1]], packed=False, rules=MicroBatchRules(row_multiple=2))
    assert batch.tokens.tolist() == [[1, 2, 0, 0], [3, 4, 5, 0]]
    assert batch.labels.tolist() == [[2, 0, 0, 0], [4, 5, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.sequence_index.tolist() == [[0, 0, -1, -1], [1, 1, 1, -1]]
    assert batch.fields["advantages"].tolist() == [[2.0, 0, 0, 0], [4, 5, 0, 0]]
    assert batch.cu_seqlens is None
    assert batch.max_seqlen == 4


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("multiple", [1, 4])
def test_empty_bin_is_a_microbatch_of_padding(packed: bool, multiple: int):
    sequences = make_sequences([3])
    batch, empty = make_microbatches(sequences, [[0], []], packed=packed, rules=MicroBatchRules(row_multiple=multiple))
    assert empty.tokens.shape == (1, multiple)
    assert not empty.mask.any()
    assert (empty.sequence_index == -1).all()
    assert empty.fields["advantages"].shape == (1, multiple)
    assert {t.dtype for t in empty.fields.values()} == {t.dtype for t in batch.fields.values()}
    for name in ("tokens", "labels", "position_ids", "mask", "sequence_index"):
        assert getattr(empty, name).dtype == getattr(batch, name).dtype
    if packed:
        assert empty.cu_seqlens.tolist() == [0, multiple]
        assert empty.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("multiple", [1, 4, 7])
@pytest.mark.parametrize("seed", range(10))
def test_nothing_crosses_sequences_and_all_comes_back(packed: bool, multiple: int, seed: int):
    generator = random.Random(seed)
    lengths = [generator.randint(1, generator.choice([3, 12, 40])) for _ in range(generator.randint(1, 40))]
    sequences = make_sequences(lengths, seed)
    plan = plan_microbatches(lengths, max(lengths) + 50, packed=packed, num_microbatches=generator.randint(1, 8))
    batches = make_microbatches(sequences, plan, packed=packed, rules=MicroBatchRules(row_multiple=multiple))
    for batch in batches:
        assert batch.tokens.shape[1] % multiple == 0
        owner, width = batch.sequence_index, batch.tokens.shape[1]
        for row in range(batch.tokens.shape[0]):
            for s in range(width):
                i, t = int(owner[row, s]), int(batch.position_ids[row, s])
                has_label = i >= 0 and t + 1 < lengths[i]
                assert batch.tokens[row, s] == (sequences[i].token_ids[t] if i >= 0 else 0)
                assert batch.labels[row, s] == (sequences[i].token_ids[t + 1] if has_label else 0)
                assert batch.mask[row, s] == (has_label and bool(sequences[i].loss_mask[t + 1]))
                assert batch.fields["advantages"][row, s] == batch.labels[row, s]
        if packed:  # attention and positions see the same borders
            starts = (batch.position_ids[0] == 0).nonzero().flatten().tolist()
            assert [*starts, width] == batch.cu_seqlens.tolist()
            assert batch.max_seqlen == int(batch.cu_seqlens.diff().max())
    # each label comes back at the place of its own token; garbage on padding comes back nowhere
    outputs = [torch.where(b.sequence_index >= 0, b.labels.float() + 0.5, torch.nan) for b in batches]
    for sequence, values in zip(sequences, scatter_to_sequences(outputs, batches, sequences), strict=True):
        assert values.tolist() == [0.0, *(sequence.token_ids[1:] + 0.5).tolist()]
    assert sum(int(b.mask.sum()) for b in batches) == sum(int(s.loss_mask.sum()) for s in sequences)


def test_scatter_gives_gradients_and_packed_equals_padded():
    sequences = make_sequences([5, 2, 7, 1])
    table = torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    results = []
    for packed in (True, False):
        batches = make_microbatches(sequences, [[0, 3], [1, 2]], packed=packed, rules=MicroBatchRules(row_multiple=4))
        results.append(scatter_to_sequences([table[b.labels] for b in batches], batches, sequences))
    for packed_values, padded_values in zip(*results, strict=True):
        assert torch.equal(packed_values, padded_values)
    torch.cat(results[0]).sum().backward()
    assert table.grad[2] == 1  # label of token 1
    assert table.grad[1] == 0  # first token: nothing predicts it


def test_padding_fraction():
    sequences = make_sequences([2, 4])
    assert padding_fraction(make_microbatches(sequences, [[0, 1]], packed=False)) == 0.25
    assert padding_fraction(make_microbatches(sequences, [[0, 1]])) == 0.0
    assert padding_fraction(make_microbatches(sequences, [[0, 1], []], rules=MicroBatchRules(row_multiple=2))) == 0.25
    assert padding_fraction([]) == 0.0


def test_to_moves_everything_but_the_boundaries():
    (batch,) = make_microbatches(make_sequences([3, 2]), [[0, 1]])
    moved = batch.to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)] + list(moved.fields.values())
    assert len(tensors) == 7
    # the boundaries are read in every forward pass, which must not wait for the device
    assert {tensor.device.type for tensor in tensors if tensor is not moved.cu_seqlens} == {"meta"}
    assert moved.cu_seqlens.device.type == "cpu"
    assert moved.max_seqlen == batch.max_seqlen


def test_bad_sequences_are_refused():
    ids = torch.tensor([4, 5])
    with pytest.raises(ValueError, match=r"loss_mask\[0\] is True"):
        TokenSequence(ids, torch.tensor([True, True]))
    with pytest.raises(ValueError, match=r"advantages has shape \[3\], token_ids has \[2\]"):
        TokenSequence(ids, torch.tensor([False, True]), {"advantages": torch.zeros(3)})
    with pytest.raises(ValueError, match="not empty"):
        TokenSequence(ids[:0], ids[:0].bool())
    sequences = [*make_sequences([2]), TokenSequence(ids, torch.tensor([False, True]))]
    with pytest.raises(ValueError, match=r"sequence 1 has fields \[\], sequence 0 has \['advantages'\]"):
        make_microbatches(sequences, [[0, 1]])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("cp_size", [2, 3])
def test_context_parallel_shares_partition_a_micro_batch(packed: bool, cp_size: int):
    """Fails when labels are shifted after the split: a chunk's last token would predict the next chunk of its rank."""
    sequences = make_sequences([13, 1, 7, 30])
    rules = MicroBatchRules(sequence_multiple=2 * cp_size, row_multiple=4 * cp_size)
    (whole,) = make_microbatches(sequences, [[0, 1, 2, 3]], packed=packed, rules=rules)
    shares = [context_parallel_share(whole, cp_size, rank) for rank in range(cp_size)]
    seen = []
    for share in shares:
        assert share.tokens.shape == (whole.tokens.shape[0], whole.tokens.shape[1] // cp_size)
        assert share.tokens.shape[1] % 2 == 0, "sequence parallelism splits the share"
        for row, column in share.mask.nonzero().tolist():
            owner, position = int(share.sequence_index[row, column]), int(share.position_ids[row, column])
            assert share.tokens[row, column] == sequences[owner].token_ids[position]
            assert share.labels[row, column] == sequences[owner].token_ids[position + 1]
            assert share.fields["advantages"][row, column] == share.labels[row, column]
            seen.append((owner, position))
    targets = [(owner, t - 1) for owner, s in enumerate(sequences) for t in s.loss_mask.nonzero().flatten().tolist()]
    assert sorted(seen) == sorted(targets)
    table = torch.arange(100.0)
    parts = [scatter_to_sequences([table[share.labels]], [share], sequences) for share in shares]
    for sequence, *values in zip(sequences, *parts, strict=True):
        assert torch.equal(sum(values)[1:], sequence.token_ids[1:].float())


@pytest.mark.parametrize("packed", [True, False])
def test_interleaved_schedules_get_micro_batches_of_one_shape(packed: bool):
    sequences = make_sequences([9, 3, 4])
    rules = MicroBatchRules(row_multiple=2, count_multiple=2, same_shape=True)
    batches = make_microbatches(sequences, [[0], [1, 2], []], packed=packed, rules=rules)
    assert len({batch.tokens.shape for batch in batches}) == 1
    assert not batches[2].mask.any()
    if packed:
        for batch in batches:  # padding at the end is cut in pieces: attention would pay for one long sequence
            assert int(batch.cu_seqlens[-1]) == batch.tokens.shape[1]
            assert batch.max_seqlen == int(batch.cu_seqlens.diff().max())


def test_a_replica_without_sequences_has_the_fields_of_the_others():
    (batch,) = make_microbatches([], [[]], field_names=["advantages"])
    assert not batch.mask.any()
    assert batch.fields["advantages"].shape == batch.tokens.shape


@pytest.mark.parametrize("packed", [True, False])
def test_padding_stands_on_the_right(packed: bool):
    """Megatron numbers positions from the left: padding there would shift every rotation."""
    sequences = make_sequences([3, 6, 1])
    rules = MicroBatchRules(sequence_multiple=4, row_multiple=8)
    (batch,) = make_microbatches(sequences, [[0, 1, 2]], packed=packed, rules=rules)
    for index, sequence in enumerate(sequences):
        mine = batch.sequence_index == index
        assert batch.position_ids[mine].tolist() == list(range(len(sequence)))
        assert torch.equal(batch.tokens[mine], sequence.token_ids)
    starts = batch.position_ids == 0
    real = batch.sequence_index >= 0
    assert int((starts & real).sum()) == len(sequences)
