"""What a loader reads of its weights: rectangles, whatever it does with them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron_rl.weights.messages import empty_tensors
from lightning_megatron_rl.weights.placement import fill_buckets, view_all
from lightning_megatron_rl.weights.reads import MOST_PARTS, Read, prove_reads, record_reads
from lightning_megatron_rl.weights.rectangles import Rectangle

WHOLE = [Rectangle(0, 0, 8, 6)]
TARGET = torch.zeros(8, 6)
HOLDER = torch.nn.Linear(6, 8)


def take(weight: Tensor) -> None:
    HOLDER.weight.data = weight


LOADERS: dict[str, tuple[Callable[[Tensor], Any], list[Rectangle]]] = {
    "all of it": (TARGET.copy_, WHOLE),
    "nothing": (lambda weight: weight.narrow(0, 2, 3), []),
    "rows": (lambda weight: TARGET[:3].copy_(weight.narrow(0, 2, 3)), [Rectangle(2, 0, 3, 6)]),
    "columns": (lambda weight: TARGET[:, :2].copy_(weight[:, 3:5]), [Rectangle(0, 3, 8, 2)]),
    "columns turned": (lambda weight: TARGET.T[:2, :3].copy_(weight[1:3, 3:6]), [Rectangle(1, 3, 2, 3)]),
    "a transpose": (lambda weight: torch.zeros(2, 8).copy_(weight.T[3:5]), [Rectangle(0, 3, 8, 2)]),
    "twice the same": (lambda weight: [TARGET[:3].copy_(weight[2:5]) for _ in range(2)], [Rectangle(2, 0, 3, 6)]),
    "two that overlap": (
        lambda weight: [TARGET[:3].copy_(weight[2:5]), TARGET[:3].copy_(weight[3:6])],
        [Rectangle(2, 0, 3, 6), Rectangle(5, 0, 1, 6)],
    ),
    "another dtype": (lambda weight: weight[4:].to(torch.bfloat16), [Rectangle(4, 0, 4, 6)]),
    "a product": (lambda weight: weight[:, :2] @ torch.ones(2, 2), [Rectangle(0, 0, 8, 2)]),
    "expanded": (lambda weight: torch.zeros(5, 6).copy_(weight[3].expand(5, 6)), [Rectangle(3, 0, 1, 6)]),
    "one number": (lambda weight: weight[3, 4].item(), [Rectangle(3, 4, 1, 1)]),
    "three dimensions": (lambda weight: weight.view(8, 2, 3)[:, 1, 1:].clone(), [Rectangle(0, 4, 8, 2)]),
    "every other row": (lambda weight: weight[::2].clone(), WHOLE),
    "rows across": (lambda weight: weight.view(-1)[3:15].clone(), WHOLE),
    "bytes": (lambda weight: weight[2:4].view(torch.uint8).clone(), WHOLE),
    "written to": (lambda weight: weight[:1].mul_(2), WHOLE),
    "its memory taken": (take, WHOLE),
}


def in_bucket(weights: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """As they come: end to end in one block."""
    ((buffer, placements),) = fill_buckets(weights, 10_000)
    return list(zip((place.name for place in placements), view_all(placements, [buffer]), strict=True))


@pytest.mark.parametrize("case", LOADERS)
def test_what_is_read_of_a_weight(case):
    work, expected = LOADERS[case]
    weights = in_bucket([("before", torch.zeros(3)), ("it", torch.randn(8, 6)), ("behind", torch.zeros(()))])
    reads = record_reads(lambda given: work(dict(given)["it"]), weights, lambda: [TARGET, *HOLDER.parameters()])
    assert list(reads["it"].parts) == expected
    assert (reads["before"].parts, reads["behind"].parts) == ((), ())
    assert Read.from_plain(reads["it"].to_plain()) == reads["it"]
    assert reads["it"].num_bytes == 4 * sum(part.size for part in expected)


def test_a_weight_that_is_read_in_many_parts_is_read_whole():
    for count, parts in ((MOST_PARTS, MOST_PARTS), (MOST_PARTS + 1, 1)):
        weights = in_bucket([("it", torch.zeros(2 * MOST_PARTS + 2, 2))])

        def load(given: Iterator[tuple[str, Tensor]], count: int = count) -> None:
            weight = dict(given)["it"]
            for row in range(count):
                weight[2 * row].clone()

        assert len(record_reads(load, weights, list)["it"].parts) == parts


def test_a_scalar_and_an_empty_weight():
    weights = in_bucket([("one", torch.ones(())), ("none", torch.zeros(0, 4))])
    target = torch.zeros(())
    reads = record_reads(lambda given: target.copy_(dict(given)["one"]), weights, list)
    assert reads["one"].parts == (Rectangle(0, 0, 1, 1),)
    assert reads["none"].parts == ()


def test_a_dtype_that_is_none_is_refused():
    with pytest.raises(ValueError, match="'nn' is none of torch's dtypes"):
        Read.from_plain([[8, 6], "nn", []])


def test_what_is_read_is_proved_with_nan_in_place_of_the_rest():
    """A loader that reads other parts than before, or in a way that is not seen."""
    weights = in_bucket([("it", torch.randn(8, 6))])
    target = torch.zeros(8, 6)
    offset = 0

    def load(given: Iterator[tuple[str, Tensor]]) -> None:
        weight = dict(given)["it"]
        target[:3].copy_(weight[offset : offset + 3])

    def load_unseen(given: Iterator[tuple[str, Tensor]]) -> None:
        weight = dict(given)["it"]
        target[:3].copy_(weight[:3])
        target[5, 0] = float(weight.numpy()[7, 0])

    reads = record_reads(load, weights, lambda: [target])

    def received() -> dict[str, Tensor]:
        tensors = empty_tensors(reads, nan=True)
        tensors["it"][:3] = 1
        return tensors

    prove_reads(load, received(), reads, lambda: [target])
    assert target[:3].eq(1).all()
    with pytest.raises(RuntimeError, match="in a way that is not seen"):
        prove_reads(load_unseen, received(), reads, lambda: [target])
    target.zero_()
    offset = 1
    with pytest.raises(RuntimeError, match="it is not loaded as before"):
        prove_reads(load, received(), reads, lambda: [target])
