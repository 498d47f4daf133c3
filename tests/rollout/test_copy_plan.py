"""A model's own loading becomes a list of copies; what is more than copies does not."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron_rl.rollout.copy_plan import CopyPlan, record_copies
from lightning_megatron_rl.rollout.placement import place

ROWS, WIDTH = 4, 6


class Fused(nn.Module):
    """Loads as vLLM's models do: q, k and v of one rank of two into one parameter, experts into a stack of them."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.qkv = nn.Parameter(torch.zeros(3 * ROWS // 2, WIDTH))
        self.down = nn.Parameter(torch.zeros(ROWS, WIDTH // 2))
        self.experts = nn.Parameter(torch.zeros(2, ROWS, WIDTH))
        self.prepare: Callable[[Tensor], Tensor] = lambda loaded: loaded

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, loaded in weights:
            loaded = self.prepare(loaded)
            half = ROWS // 2
            if name in ("q", "k", "v"):
                start = "qkv".index(name) * half
                self.qkv.data.narrow(0, start, half).copy_(loaded.narrow(0, self.rank * half, half))
            elif name == "down":
                self.down.data.copy_(loaded.narrow(1, self.rank * WIDTH // 2, WIDTH // 2))
            else:
                self.experts.data[int(name[-1])].copy_(loaded)


def weights(seed: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, Tensor]]:
    """All from one buffer, as the trainer's."""
    generator = torch.Generator().manual_seed(seed)
    names = ["q", "k", "v", "down", "expert0", "expert1"]
    buffer = torch.randn(len(names) * ROWS * WIDTH, generator=generator).to(dtype)
    return [(name, part.view(ROWS, WIDTH)) for name, part in zip(names, buffer.split(ROWS * WIDTH), strict=True)]


def record(model: Fused, named: list[tuple[str, Tensor]]) -> CopyPlan | None:
    return record_copies(model.load_weights, *place(named), model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1])
def test_replay_does_what_loading_does(rank, dtype):
    model, expected = Fused(rank), Fused(rank)
    plan = record(model, weights(1, dtype))
    assert plan is not None
    assert len(plan.targets) == 6
    expected.load_weights(weights(1, dtype))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))
    plan.run(place(weights(2, dtype))[0])
    expected.load_weights(weights(2, dtype))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize(
    "prepare",
    [lambda loaded: loaded * 2, lambda loaded: loaded.double(), lambda loaded: loaded.flip(0)],
    ids=["product", "dtype", "other rows"],
)
def test_more_than_copies_is_no_plan(prepare):
    """The values are loaded all the same, and the next update will be, too."""
    model = Fused(0)
    model.prepare = prepare
    named = weights(1)
    assert record(model, named) is None
    assert torch.equal(model.experts[1], prepare(named[-1][1]).float())


def test_copies_to_other_places_are_no_plan():
    """What is put aside and used later would be stale."""
    model = Fused(0)
    aside = torch.zeros(ROWS, WIDTH)

    def keep(loaded: Tensor) -> Tensor:
        aside.copy_(loaded)
        return loaded

    model.prepare = keep
    assert record(model, weights(1)) is None
