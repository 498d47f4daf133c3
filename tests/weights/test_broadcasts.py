"""Buckets of known weights that are broadcast one behind the other, over gloo in place of NCCL."""

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from lightning_megatron_rl.weights.placement import Placement, fill_buckets
from lightning_megatron_rl.weights.source import WeightViews, source_of
from lightning_megatron_rl.weights.transports.nccl import Broadcasts, NCCLTransport

CAPACITY = 4096  # bytes of a bucket
SIZES = [3, 700, 1000, 1, 2000, 5, 900, 64]  # elements of four bytes: one is larger than a bucket


def weights(round_number: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(round_number)
    for number, size in enumerate(SIZES):
        yield f"layer.{number}", torch.randn(size, generator=generator)


def buckets_of(tensors: Iterator[tuple[str, Tensor]]) -> list[list[Placement]]:
    return [placements for _, placements in fill_buckets(tensors, CAPACITY)]


def exchange(rounds: int, slow: int, sent: str) -> list[str]:
    """Send, or receive and compare; one of the two takes its time. Returns what the sender says of the last round."""
    group, rank = dist.distributed_c10d._get_default_group(), dist.get_rank()
    known = buckets_of(weights(0))
    other: list[str] = []
    for number in range(rounds):
        broadcasts = Broadcasts(group, [bucket[-1].end for bucket in known], torch.device("cpu"))
        if rank == 0:
            coming = weights(number)
            if sent == "fewer":
                coming = iter(list(coming)[:-1])
            elif sent == "more":
                coming = iter([*coming, ("more", torch.ones(1))])
            elif sent == "of other sizes":
                coming = ((name, tensor.repeat(2)) for name, tensor in coming)
            other = broadcasts.send(known, slowly(coming, slow == 0))
            continue
        expected = dict(weights(number))
        found = {}
        for bucket, block in zip(known, broadcasts.receive(), strict=True):
            pause(slow == 1)
            found |= {place.name: place.view([block]).clone() for place in bucket}
        if sent == "as known":
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
    return other


def slowly(tensors: Iterator[tuple[str, Tensor]], is_slow: bool) -> Iterator[tuple[str, Tensor]]:
    for pair in tensors:
        pause(is_slow)
        yield pair


def pause(is_slow: bool) -> None:
    time.sleep(0.02 if is_slow else 0.0)


@pytest.mark.parametrize("slow", [0, 1])
def test_what_is_known_comes_without_a_word(worker_pool, slow):
    """No bucket is overwritten before it has gone, or before it was read."""
    assert len(buckets_of(weights(0))) > 3
    assert worker_pool.run(exchange, 3, slow, "as known", world_size=2)[0] == []


@pytest.mark.parametrize(
    ("sent", "named"),
    [("fewer", ["layer.7"]), ("more", ["more"]), ("of other sizes", [f"layer.{n}" for n in range(len(SIZES))])],
)
def test_what_is_not_known_is_named_and_nobody_waits(worker_pool, sent, named):
    assert worker_pool.run(exchange, 1, -1, sent, world_size=2)[0] == named


def test_whole_weights_are_compared_before_anything_is_sent():
    """Then the workers are told anew what comes in which bucket."""
    transport = NCCLTransport(1, 1.0)
    transport._buckets = buckets_of(weights(0))
    assert not transport._are_others(source_of(list(weights(1))).whole)
    assert transport._are_others(source_of(list(weights(1))[1:]).whole)
    assert transport._are_others(WeightViews.of([(name, tensor.double()) for name, tensor in weights(1)]))
    assert not transport._are_others(source_of(weights(1)).whole)
    transport.forget()
    assert transport._buckets == []
