"""Places of tensors in memory that others map, and buckets of a bounded size."""

import pytest
import torch

from lightning_megatron_rl.rollout.placement import ALIGNMENT, fill_buckets, place


def test_views_of_one_buffer_share_a_block():
    buffer = torch.arange(24, dtype=torch.bfloat16)
    alone = torch.randn(3, 2)
    tensors = [("a", buffer[:6].view(2, 3)), ("b", buffer[6:].view(6, 3).t()), ("c", alone)]
    blocks, placements = place(tensors)
    assert len(blocks) == 2
    for (name, tensor), placement in zip(tensors, placements, strict=True):
        assert placement.name == name
        assert torch.equal(placement.view(blocks), tensor)
        assert placement.num_bytes == tensor.numel() * tensor.itemsize
    blocks[0].zero_()
    assert buffer.abs().sum() == 0  # no copy was made


def test_buckets_hold_everything_once_and_never_more_than_their_size():
    generator = torch.Generator().manual_seed(0)
    sizes = [(5,), (40, 3), (1,), (64, 64), (7, 7), (200,), (3,)]
    tensors = [(f"w{i}", torch.randn(size, generator=generator)) for i, size in enumerate(sizes)]
    capacity = 1024
    found = {}
    buffers = []
    for buffer, placements in fill_buckets(iter(tensors), capacity):
        largest = max(placement.num_bytes for placement in placements)
        assert buffer.numel() == max(capacity, largest, *(len(b) for b in buffers[-1:]))
        assert all(placement.offset % ALIGNMENT == 0 for placement in placements)
        end = max(placement.offset + placement.num_bytes for placement in placements)
        assert end <= (capacity if len(placements) > 1 else max(capacity, largest))
        for placement in placements:
            assert placement.name not in found
            found[placement.name] = placement.view([buffer]).clone()  # the buffer is filled again
        buffers.append(buffer)
    assert list(found) == [name for name, _ in tensors]
    for name, tensor in tensors:
        assert torch.equal(found[name], tensor)
    assert len({id(buffer) for buffer in buffers}) == 2  # one of the given size, one for the tensor that exceeds it


def test_buckets_keep_dtypes_and_offsets():
    tensors = [("a", torch.zeros(10)), ("b", torch.ones(3, dtype=torch.bfloat16)), ("c", torch.zeros(10))]
    ((_, placements),) = fill_buckets(tensors, 4096)
    assert [placement.offset for placement in placements] == [0, 64, 128]
    assert [placement.dtype for placement in placements] == [torch.float32, torch.bfloat16, torch.float32]


def test_no_tensors_are_no_buckets():
    assert list(fill_buckets([], 64)) == []
    with pytest.raises(ValueError, match="a bucket of 0 bytes"):
        list(fill_buckets([], 0))
