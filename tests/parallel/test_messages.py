"""Objects with tensors in them, there and back."""

from typing import Any

import torch

from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.parallel.messages import pack, unpack


def sequences(count: int, length: int) -> list[TokenSequence]:
    fields = {"old_logprobs": torch.rand(count, length), "advantages": torch.rand(count, length).double()}
    return [
        TokenSequence(
            torch.arange(length) + index,
            torch.arange(length) > 1,
            {name: values[index] for name, values in fields.items()},
            torch.randint(4, (length, 3, 2)).to(torch.int16),
            f"row {index}",
        )
        for index in range(count)
    ]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def test_objects_come_back_as_they_were():
    shared = torch.arange(4)
    value = [
        {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "half": torch.rand(3, 2).bfloat16()},
        (
            shared,
            shared,
            torch.tensor([True, False]),
            torch.arange(12).view(3, 4).t(),
            torch.empty(0, dtype=torch.complex128),
        ),
        ["text", None, 7, [], torch.randn(2, requires_grad=True), torch.nn.Parameter(torch.ones(2))],
    ]
    found = unpack(pack(value))
    assert same(found[:2], value[:2])
    assert found[2][:4] == value[2][:4]
    assert found[2][4].requires_grad
    assert isinstance(found[2][5], torch.nn.Parameter)
    assert unpack(pack([])) == []


def test_sequences_come_back_as_they_were():
    sent = sequences(5, 7)
    for mine, theirs in zip(unpack(pack(sent)), sent, strict=True):
        assert same(vars(mine), vars(theirs))


def test_tensors_take_along_neither_what_they_are_views_of_nor_their_descriptions():
    """One by one each would cost a few hundred bytes, and as much time as thousands of its elements."""
    sent = sequences(100, 20)
    payload = sum(
        tensor.numel() * tensor.itemsize
        for sequence in sent
        for tensor in (sequence.token_ids, sequence.loss_mask, sequence.routing, *sequence.fields.values())
    )
    assert payload < len(pack(sent)) < 1.2 * payload


def test_each_tensor_has_memory_of_its_own():
    first, second = unpack(pack([torch.zeros(3), torch.zeros(3)]))
    assert first.untyped_storage().nbytes() == 12
    first += 1
    assert second.tolist() == [0, 0, 0]
