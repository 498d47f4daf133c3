import os
import weakref
from pathlib import Path

import pytest
import torch

from lightning_megatron_rl.weights.placement import ALIGNMENT
from lightning_megatron_rl.weights.transports.host import INITIAL_BYTES, SharedWeights, read_weights


@pytest.fixture
def shared():
    shared = SharedWeights()
    yield shared
    shared.close()


def read(shared, plan):
    return dict(read_weights(f"/proc/{os.getpid()}/fd/{shared.fd}", plan))


def test_every_dtype_and_shape_arrives(shared):
    weights = {
        "float32": torch.randn(3, 5),
        "bfloat16": torch.randn(7).bfloat16(),
        "transposed": torch.randn(4, 6).t(),
        "scalar": torch.tensor(2.5),
        "int8": torch.arange(3, dtype=torch.int8),
        "empty": torch.empty(0, 4),
    }
    plan = shared.write(weights.items())
    arrived = read(shared, plan)
    assert list(arrived) == list(weights)
    for name, tensor in weights.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor)
    assert all(slot.offset % ALIGNMENT == 0 for slot in plan)


def test_memory_grows_and_keeps_what_was_written_before(shared):
    first = torch.randn(INITIAL_BYTES // 8)
    second = torch.randn(INITIAL_BYTES)  # 4 bytes each: four times the first size
    arrived = read(shared, shared.write([("first", first), ("second", second)]))
    assert torch.equal(arrived["first"], first)
    assert torch.equal(arrived["second"], second)


def test_plan_is_replayed_while_the_list_is_the_same(shared):
    plan = shared.write([("a", torch.zeros(3)), ("b", torch.zeros(4))])
    slots = [id(slot) for slot in shared.plan]
    assert shared.write([("a", torch.ones(3)), ("b", torch.ones(4))]) == plan
    assert [id(slot) for slot in shared.plan] == slots
    assert read(shared, plan)["b"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "other",
    [
        [("a", torch.randn(3)), ("c", torch.randn(4)), ("d", torch.randn(5))],
        [("a", torch.randn(30)), ("b", torch.randn(4))],
        [("a", torch.randn(3)), ("b", torch.randn(4).bfloat16())],
        [("a", torch.randn(3))],
    ],
    ids=["name", "shape", "dtype", "shorter"],
)
def test_another_list_is_planned_anew(shared, other):
    shared.write([("a", torch.zeros(3)), ("b", torch.zeros(4))])
    arrived = read(shared, shared.write(other))
    assert list(arrived) == [name for name, _ in other]
    assert all(torch.equal(arrived[name], tensor) for name, tensor in other)


def test_one_tensor_at_a_time(shared):
    """An iterable that gathers shard by shard is not drained first: a tensor is free before the next but one."""
    references: list[weakref.ref] = []
    num_alive = []

    def weights():
        for index in range(4):
            tensor = torch.full((10,), float(index))
            references.append(weakref.ref(tensor))
            num_alive.append(sum(reference() is not None for reference in references))
            yield f"w{index}", tensor

    shared.write(weights())
    # the loop still holds the last tensor while the generator makes the next
    assert max(num_alive) <= 2


def named_memory() -> set[str]:
    """What this process has mapped of /dev/shm."""
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line}


def test_nothing_has_a_name(shared):
    before = named_memory()
    shared.write([("a", torch.zeros(1000))])
    assert named_memory() == before
