"""Packed and context-parallel attention against attention with an explicit mask over the whole batch."""

import pytest
import torch
from torch import Tensor

from lightning_megatron_rl.models.layers.packed_attention import (
    Softmax,
    packed_attention,
    packed_positions,
    packed_zigzag_attention,
    zigzag_positions,
)

HEADS, GROUPS, CHANNELS = 4, 2, 8
VARIANTS = {  # by window and whether heads have a sink
    "plain": (None, False),
    "window": (4, False),
    "sink": (None, True),
    "window and sink": (4, True),
}
TOLERANCE = 1e-5  # fp32 softmax over at most 100 tokens, summed in another order


def softmax_of(variant: str) -> Softmax:
    window, has_sink = VARIANTS[variant]
    sink = torch.linspace(-1, 2, HEADS).requires_grad_() if has_sink else None
    return Softmax(scale=0.3, window=window, sink=sink)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], softmax: Softmax) -> Tensor:
    """Attention over all packed tokens with a mask that hides other sequences, the future and the distant past."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(len(sequence))
    visible = (sequence[:, None] == sequence[None, :]) & (position[:, None] >= position[None, :])
    if softmax.window is not None:
        visible &= position[:, None] - position[None, :] < softmax.window
    key, value = (tensor.repeat_interleave(HEADS // GROUPS, dim=1) for tensor in (key, value))
    scores = (torch.einsum("qhd,khd->hqk", query, key) * softmax.scale).masked_fill(~visible, -torch.inf)
    weights = scores.exp()
    rest = 0 if softmax.sink is None else softmax.sink.exp()[:, None, None]
    weights = weights / (weights.sum(-1, keepdim=True) + rest)
    return torch.einsum("hqk,khd->qhd", weights, value)


def inputs(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, CHANNELS), (GROUPS, CHANNELS), (GROUPS, CHANNELS))
    return [torch.randn(tokens, *shape, generator=generator).requires_grad_() for shape in shapes]


def boundaries(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize(
    "lengths",
    [[7], [5, 5, 5], [3, 1, 20, 8], [40, 3, 100, 35, 64, 2, 90], [4, 0, 6]],
    ids=["one", "equal", "one bucket", "many buckets", "empty sequence"],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_sequences_see_only_themselves(variant: str, lengths: list[int]):
    tensors = inputs(sum(lengths))
    softmax = softmax_of(variant)
    expected = masked_attention(*tensors, lengths, softmax)
    if softmax.sink is not None:
        tensors.append(softmax.sink)
    out_grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected_grads = torch.autograd.grad(expected, tensors, out_grad)
    result = packed_attention(*tensors[:3], boundaries(lengths), softmax)
    torch.testing.assert_close(result, expected, atol=TOLERANCE, rtol=TOLERANCE)
    for grad, expected_grad in zip(torch.autograd.grad(result, tensors, out_grad), expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cp_size", [2, 4])
def test_the_ranks_of_context_parallelism_together_make_the_whole(cp_size: int, variant: str):
    lengths = [16, 8, 24]
    tensors = inputs(sum(lengths))
    softmax = softmax_of(variant)
    expected = masked_attention(*tensors, lengths, softmax)
    out_grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected_grads = torch.autograd.grad(expected, tensors, out_grad)
    starts = boundaries(lengths)[:-1].tolist()
    held = [  # tokens of each rank
        torch.cat(
            [start + zigzag_positions(length, cp_size, rank) for start, length in zip(starts, lengths, strict=True)]
        )
        for rank in range(cp_size)
    ]
    query, key, value = tensors
    keys, values = (torch.stack([tensor[tokens] for tokens in held]) for tensor in (key, value))
    results = []
    for rank, tokens in enumerate(held):
        results.append(packed_zigzag_attention(query[tokens], keys, values, boundaries(lengths), rank, softmax))
        torch.testing.assert_close(results[-1], expected[tokens], atol=TOLERANCE, rtol=TOLERANCE)
    grads = torch.autograd.grad(torch.cat(results), tensors, out_grad[torch.cat(held)])
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=TOLERANCE, rtol=TOLERANCE)


def test_positions_restart_in_each_sequence():
    assert packed_positions((0, 3, 5), 1, 0, torch.device("cpu")).tolist() == [0, 1, 2, 0, 1]
    assert packed_positions((0, 8, 12), 2, 1, torch.device("cpu")).tolist() == [2, 3, 4, 5, 1, 2]


def test_zigzag_shares_the_first_and_the_last_chunk():
    assert zigzag_positions(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_positions(8, 2, 1).tolist() == [2, 3, 4, 5]
