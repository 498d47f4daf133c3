"""Rotary embeddings of packed sequences: Megatron's numbers, and no work per sequence."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron_rl.compat.packed_rope import install_packed_rope, token_positions


@dataclass
class Place:
    """Where a rank is in its context-parallel group: all that rotating asks of one."""

    ranks: int = 1
    place: int = 0

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.place


class Operations(TorchDispatchMode):
    """Counts what torch is asked to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def rope_utils():
    from megatron.core.models.common.embeddings import rope_utils

    install_packed_rope()
    return rope_utils


def inputs(lengths: list[int], group: Place, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of this rank [tokens, 2 heads, 8], boundaries, and angles of every position for 6 of the 8 numbers."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(sum(lengths) // group.size(), 2, 8, generator=generator).to(dtype)
    boundaries = torch.tensor([0, *lengths]).cumsum(0).int()
    return queries, boundaries, torch.randn(max(lengths), 1, 1, 6, generator=generator)


def test_positions_by_hand():
    boundaries = torch.tensor([0, 3, 3, 5])  # the second sequence is empty
    assert token_positions(boundaries, 5).tolist() == [0, 1, 2, 0, 1]
    shared = torch.tensor([0, 8, 12])  # two ranks, four parts of 2 and of 1
    assert token_positions(shared, 6, 2, 0).tolist() == [0, 1, 6, 7, 0, 3]
    assert token_positions(shared, 6, 2, 1).tolist() == [2, 3, 4, 5, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [Place(), Place(2, 0), Place(2, 1)], ids=["alone", "first of two", "second of two"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_numbers_and_gradients_are_megatrons(rope_utils, group, dtype, interleaved):
    """Equal bit for bit: each number is made by the same operations."""
    queries, boundaries, angles = inputs([8, 20, 4, 12], group, dtype)
    found = []
    for rotate in (rope_utils._apply_rotary_pos_emb_thd, rope_utils._apply_rotary_pos_emb_thd.__wrapped__):
        start = queries.clone().requires_grad_()
        rotated = rotate(start, boundaries, angles, rotary_interleaved=interleaved, mscale=1.5, cp_group=group)
        (gradient,) = torch.autograd.grad((rotated.float() ** 2).sum(), start)
        found.append((rotated, gradient))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], queries)


def test_one_sequence_and_positions_of_a_whole_batch_are_megatrons(rope_utils):
    """As many angles as tokens mean that positions do not restart."""
    queries, boundaries, _ = inputs([3, 5], Place(), torch.float32)
    angles = torch.randn(8, 1, 1, 8)
    rotate = rope_utils._apply_rotary_pos_emb_thd
    expected = rope_utils._apply_rotary_pos_emb_bshd(queries.unsqueeze(1), angles).squeeze(1)
    assert torch.equal(rotate(queries, boundaries, angles, cp_group=Place()), expected)


def test_many_sequences_take_no_more_operations_than_two(rope_utils):
    """Megatron's own takes more for each: the reason of this module."""

    def operations(rotate: Any, lengths: list[int]) -> int:
        queries, boundaries, angles = inputs(lengths, Place(), torch.float32)
        with Operations() as seen:
            rotate(queries, boundaries, angles, cp_group=Place())
        return seen.count

    ours = rope_utils._apply_rotary_pos_emb_thd
    assert operations(ours, [4] * 100) == operations(ours, [4] * 2)
    assert operations(ours.__wrapped__, [4] * 100) > 10 * operations(ours.__wrapped__, [4] * 2)
