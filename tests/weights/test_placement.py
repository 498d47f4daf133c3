"""Places of tensors in memory that others map, and buckets of a bounded size."""

import pytest
import torch

from lightning_megatron_rl.weights.placement import ALIGNMENT, PlacedWeights, fill_buckets, place, view_all
from lightning_megatron_rl.weights.source import WeightView, WeightViews


def test_views_of_one_buffer_share_a_block():
    buffer = torch.arange(24, dtype=torch.bfloat16)
    alone = torch.randn(3, 2)
    tensors = [("a", buffer[:6].view(2, 3)), ("b", buffer[6:].view(6, 3).t()), ("c", alone)]
    blocks, placements = place(WeightViews.of(tensors).views)
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


def test_places_are_found_once_while_the_tensors_stay_where_they_are():
    buffer = torch.arange(24.0)
    tensors = [("a", buffer[:6].view(2, 3)), ("b", torch.zeros(3)), ("c", buffer[6:12])]
    placed = PlacedWeights()
    blocks, is_known = placed.place(WeightViews.of(tensors))
    assert not is_known
    assert placed.num_bytes == 4 * 15
    again, is_known = placed.place(WeightViews.of(tensors))
    assert is_known
    assert [block.data_ptr() for block in again] == [block.data_ptr() for block in blocks]
    for (_, tensor), view in zip(tensors, view_all(placed.placements, again), strict=True):
        assert torch.equal(view, tensor)


@pytest.mark.parametrize(
    "other",
    [
        lambda buffer: ("a", buffer[2:8].view(2, 3)),
        lambda buffer: ("a", buffer[:6].view(3, 2)),
        lambda buffer: ("a", buffer[:6].view(3, 2).t()),
        lambda buffer: ("b", buffer[:6].view(2, 3)),
        lambda buffer: ("a", buffer[:6].view(2, 3).view(torch.int32)),
    ],
    ids=["elsewhere", "shape", "strides", "name", "dtype"],
)
def test_places_that_differ_in_anything_are_new(other):
    buffer = torch.arange(24.0)
    placed = PlacedWeights()
    placed.place(WeightViews.of([("a", buffer[:6].view(2, 3))]))
    named = [other(buffer)]
    blocks, is_known = placed.place(WeightViews.of(named))
    assert not is_known
    assert torch.equal(view_all(placed.placements, blocks)[0], named[0][1])


def test_the_same_address_in_other_memory_is_a_new_place():
    """Offsets count from the start of the memory: a block that starts elsewhere shifts them."""
    buffer = torch.arange(24, dtype=torch.uint8)
    inner = buffer[8:]
    placed = PlacedWeights()
    placed.place(WeightViews.of([("a", inner)]))
    alone = torch.frombuffer(memoryview(buffer.numpy())[8:], dtype=torch.uint8)
    assert alone.data_ptr() == inner.data_ptr()
    blocks, is_known = placed.place(WeightViews.of([("a", alone)]))
    assert not is_known
    assert torch.equal(view_all(placed.placements, blocks)[0], alone)


def test_rows_that_lie_apart_are_placed_as_they_lie():
    """Rows 1, 2 and 5, 6 of a matrix are one tensor of four rows; nothing is copied until somebody wants it."""
    matrix = torch.arange(24.0).view(8, 3)
    view = matrix.as_strided((2, 2, 3), (12, 3, 1), 3)
    weights = WeightViews([WeightView("k", view, (4, 3)), WeightView("all", matrix, (8, 3))])
    blocks, (apart, whole) = place(weights.views)
    assert len(blocks) == 1
    assert apart.num_bytes == 4 * 12
    assert (apart.shape, apart.tensor_shape) == ((2, 2, 3), (4, 3))
    assert whole.tensor_shape is None
    assert torch.equal(apart.tensor(blocks), matrix[[1, 2, 5, 6]])
    assert whole.tensor(blocks).data_ptr() == matrix.data_ptr()
    assert [name for name, _ in weights] == ["k", "all"]
    assert torch.equal(weights[0][1], matrix[[1, 2, 5, 6]])
    assert torch.equal(weights[:1][0][1], matrix[[1, 2, 5, 6]])
    as_one = torch.zeros(4, 3)
    placed = PlacedWeights()
    placed.place(WeightViews([WeightView("k", view, (4, 3))]))
    assert not placed.place(WeightViews([WeightView("k", view, (2, 6))]))[1]
    assert not placed.place(WeightViews.of([("k", as_one)]))[1]


def test_weights_that_moved_in_memory_are_new_places():
    """The same views after their storage went and came back elsewhere, as a trainer's do when they are offloaded."""
    buffer = torch.arange(1024.0)
    weights = WeightViews.of([("a", buffer[8:16])])
    placed = PlacedWeights()
    placed.place(weights)
    assert placed.place(weights)[1]
    storage = buffer.untyped_storage()
    old = storage.data_ptr()
    size = storage.nbytes()
    storage.resize_(0)
    others = [torch.empty(1024) for _ in range(8)]  # they take the old address
    storage.resize_(size)
    assert others
    assert storage.data_ptr() != old
    buffer.copy_(torch.arange(1024.0))
    blocks, is_known = placed.place(weights)
    assert not is_known
    assert torch.equal(view_all(placed.placements, blocks)[0], torch.arange(8.0, 16.0))
