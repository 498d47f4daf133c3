"""Properties, searched by hypothesis: no order and no cut of a batch over micro-batches and ranks changes a number."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatron_rl.algorithms import Tally
from lightning_megatron_rl.algorithms.advantages import ADVANTAGE_ESTIMATORS, GROUP_RELATIVE, group_advantages
from lightning_megatron_rl.algorithms.aggregation import AGGREGATIONS, sequence_weights, weighted_sum
from lightning_megatron_rl.algorithms.correction import geometric_mask, truncated_importance_weights
from lightning_megatron_rl.algorithms.gae import gae
from lightning_megatron_rl.algorithms.metrics import add_mismatch_metrics, add_policy_metrics
from lightning_megatron_rl.algorithms.policy_losses import POLICY_LOSSES
from lightning_megatron_rl.algorithms.sequences import Sequences
from lightning_megatron_rl.algorithms.whitening import one_rank, whiten
from tests.algorithms.ranks import run_ranks
from tests.properties import PROPERTY, SEEDS, cuts

MAX_LENGTH = 8
# float64 sums of at most some hundred terms of size 1 to 10 in another order, some then divided by a spread
CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lengths(min_size: int = 1) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, MAX_LENGTH), min_size=min_size, max_size=12)


@st.composite
def rewards(draw: st.DrawFn) -> Tensor:
    """[P, G], many of them equal, as verifiable rewards are; with offsets that cost digits."""
    groups, size = draw(st.integers(1, 6)), draw(st.integers(2, 5))
    values = draw(st.lists(st.sampled_from([0.0, 1.0, 0.1, -2.5, 7.0]), min_size=groups * size, max_size=groups * size))
    return torch.tensor(values, dtype=torch.float64).view(groups, size) + draw(st.sampled_from([0.0, 100.0]))


# ---- advantages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS)
@PROPERTY
@given(data=st.data(), values=rewards())
def test_advantages_follow_their_samples_over_any_ranks(estimator: str, data: st.DataObject, values: Tensor):
    """Groups in another order, samples of a group in another order, groups shared out to ranks, some without any."""
    whole = group_advantages(values, estimator)
    inner = data.draw(st.permutations(range(values.shape[1])))
    parts = data.draw(cuts(len(values)))

    def rank(mine: list[int], all_reduce) -> Tensor:
        return group_advantages(values[mine][:, inner], estimator, all_reduce)

    shares = run_ranks([functools.partial(rank, part) for part in parts])
    order = [index for part in parts for index in part]
    # rewards near 100 are known to 1e-14; in a batch without spread that is divided by the 1e-6 beside the std
    torch.testing.assert_close(torch.cat(shares), whole[order][:, inner], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("estimator", GROUP_RELATIVE)
@PROPERTY
@given(values=rewards(), offsets=SEEDS)
def test_group_relative_advantages_do_not_see_what_a_group_shares(estimator: str, values: Tensor, offsets: int):
    """An offset per prompt changes nothing, a group sums to 0, one without spread is exactly 0."""
    advantages = group_advantages(values, estimator)
    shifted = group_advantages(values + randn(len(values), 1, seed=offsets), estimator)
    flat = (values == values[:, :1]).all(1)
    assert (advantages[flat] == 0).all()
    # rewards near 100 are known to 1e-14, the smallest spread is 0.04
    torch.testing.assert_close(shifted, advantages, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(advantages.sum(1), torch.zeros(len(values), dtype=torch.float64), rtol=0, atol=1e-10)


# ---- aggregation and policy losses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AGGREGATIONS)
@PROPERTY
@given(data=st.data(), sizes=lengths(), group_size=st.integers(1, 4), seed=SEEDS)
def test_aggregation_over_any_ranks_and_micro_batches(mode: str, data: st.DataObject, sizes: list[int], group_size: int,
                                                      seed: int):  # fmt: skip
    """Whole groups go to ranks, their sequences to micro-batches, and the shares add up to the loss of one."""
    sequences = [randn(size, seed=seed + number) for number, size in enumerate(sizes)]
    groups = [number // group_size for number in range(len(sizes))]
    parts = data.draw(cuts(groups[-1] + 1))
    plans = [data.draw(cuts(len(part))) for part in parts]

    def share(mine: list[int], plan: list[list[int]], all_reduce) -> Tensor:
        weights = sequence_weights(
            mode,
            torch.tensor([sizes[number] for number in mine], dtype=torch.long),
            torch.tensor([groups[number] for number in mine], dtype=torch.long),
            max_response_length=MAX_LENGTH,
            all_reduce=all_reduce,
        )
        total = torch.zeros((), dtype=torch.float64)
        for microbatch in plan:
            for position in microbatch:
                values = sequences[mine[position]]
                total = total + weighted_sum(values, weights, torch.full((len(values),), position))
        return total

    everything = list(range(len(sizes)))
    whole = share(everything, [everything], one_rank)
    ranks = []
    for part, bins in zip(parts, plans, strict=True):
        mine = [number for number in everything if groups[number] in part]
        plan = [[position for group in bin_ for position, number in enumerate(mine) if groups[number] == part[group]]
                for bin_ in bins]  # fmt: skip
        ranks.append(functools.partial(share, mine, plan))
    torch.testing.assert_close(sum(run_ranks(ranks)), whole, **CLOSE)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@PROPERTY
@given(data=st.data(), sizes=lengths(), seed=SEEDS, scale=st.sampled_from([1e-4, 0.3, 30.0]))
def test_policy_loss_of_a_token_depends_on_its_sequence_alone(name: str, data: st.DataObject, sizes: list[int],
                                                              seed: int, scale: float):  # fmt: skip
    """Loss, ratio and gradient of each token are the same in any micro-batch of whole sequences, in any order."""
    total = sum(sizes)
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    old, advantages = -randn(total, seed=seed).abs(), randn(total, seed=seed + 1)
    current = (old + scale * randn(total, seed=seed + 2)).requires_grad_()

    def losses(order: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Of the tokens of these sequences, laid end to end; back in the order of all tokens."""
        index = torch.tensor([token for number in order for token in range(starts[number], starts[number + 1])]).long()
        owner = torch.tensor([place for place, number in enumerate(order) for _ in range(sizes[number])]).long()
        sequences = Sequences(owner, torch.ones(len(index), dtype=torch.bool), len(order))
        loss, ratio = POLICY_LOSSES[name](current[index], old[index], advantages[index], sequences)
        (gradient,) = torch.autograd.grad(loss.sum(), current, materialize_grads=True)
        return torch.zeros(total).double().index_add(0, index, loss.detach()), ratio, gradient

    whole, _, gradient = losses(list(range(len(sizes))))
    parts = [losses(part) for part in data.draw(cuts(len(sizes)))]
    torch.testing.assert_close(sum(loss for loss, _, _ in parts), whole, **CLOSE)
    torch.testing.assert_close(sum(part for _, _, part in parts), gradient, **CLOSE)


# ---- what surrounds them -------------------------------------------------------------------------------------------


@PROPERTY
@given(data=st.data(), size=st.integers(1, 30), seed=SEEDS, offset=st.sampled_from([0.0, 1e6]))
def test_whitening_over_any_ranks(data: st.DataObject, size: int, seed: int, offset: float):
    values = randn(size, seed=seed) + offset
    mask = randn(size, seed=seed + 1) > -0.5
    parts = data.draw(cuts(size))
    shares = run_ranks([lambda all_reduce, p=part: whiten(values[p], mask[p], all_reduce=all_reduce) for part in parts])
    order = [index for part in parts for index in part]
    # values near 1e6 keep ten digits behind the point; a spread below 1e-2 is rare, but would cost two of them
    torch.testing.assert_close(torch.cat(shares), whiten(values, mask)[order], rtol=1e-6, atol=1e-6)


@PROPERTY
@given(data=st.data(), sizes=lengths(), seed=SEEDS, gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_of_a_row_depends_on_its_own_tokens_alone(data: st.DataObject, sizes: list[int], seed: int, gamma: float,
                                                      lam: float):  # fmt: skip
    """Row by row without padding, or as a padded batch in any order with anything in the padding and between turns."""
    width = MAX_LENGTH + data.draw(st.integers(0, 3))
    order = data.draw(st.permutations(range(len(sizes))))
    rewards_, values = torch.full((2, len(sizes), width), float("nan"), dtype=torch.float64).unbind()
    mask = torch.zeros(len(sizes), width, dtype=torch.bool)
    rows = {}
    for row, number in enumerate(order):
        places = sorted(data.draw(st.permutations(range(width)))[: sizes[number]])
        reward, value = randn(2, sizes[number], seed=seed + number).unbind()
        rewards_[row, places], values[row, places], mask[row, places] = reward, value, True
        rows[row] = places, gae(reward, value, torch.ones(sizes[number], dtype=torch.bool), gamma=gamma, lam=lam)
    advantages, returns = gae(rewards_, values, mask, gamma=gamma, lam=lam)
    assert (advantages[~mask] == 0).all()
    for row, (places, (advantage, return_)) in rows.items():
        torch.testing.assert_close(advantages[row, places], advantage, **CLOSE)
        torch.testing.assert_close(returns[row, places], return_, **CLOSE)


@pytest.mark.parametrize("level", ["token", "sequence", "geo_mask"])
@PROPERTY
@given(data=st.data(), sizes=lengths(), seed=SEEDS)
def test_corrections_do_not_see_padding_or_neighbours(level: str, data: st.DataObject, sizes: list[int], seed: int):
    """A padded batch in any order has the weights of each sequence alone."""

    def weights(old: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
        if level == "geo_mask":
            return geometric_mask(old, rollout, mask, low=0.9, high=1.1)
        return truncated_importance_weights(old, rollout, mask, level=level)  # type: ignore[arg-type]

    order = data.draw(st.permutations(range(len(sizes))))
    old, rollout = torch.full((2, len(sizes), MAX_LENGTH), float("nan"), dtype=torch.float64).unbind()
    mask = torch.arange(MAX_LENGTH) < torch.tensor([sizes[number] for number in order])[:, None]
    alone = []
    for row, number in enumerate(order):
        size = sizes[number]
        old[row, :size], noise = randn(2, size, seed=seed + number).unbind()
        rollout[row, :size] = old[row, :size] + 0.2 * noise
        alone.append(weights(old[row : row + 1, :size], rollout[row : row + 1, :size], mask[row : row + 1, :size])[0])
    together = weights(old, rollout, mask)
    assert (together[~mask] == 0).all()
    for row, expected in enumerate(alone):
        torch.testing.assert_close(together[row, : len(expected)], expected, **CLOSE)


@PROPERTY
@given(data=st.data(), size=st.integers(1, 40), seed=SEEDS)
def test_metrics_over_any_ranks_and_micro_batches(data: st.DataObject, size: int, seed: int):
    old, noise, far, advantages = randn(4, size, seed=seed).unbind()
    mask = randn(size, seed=seed + 1) > -0.5

    def tally(parts: list[list[int]]) -> Tally:
        total = Tally()
        for part in [*parts, []]:
            mine = [values[part] for values in (old, old + 0.3 * noise, old + far, advantages, mask)]
            add_mismatch_metrics(total, mine[0], mine[1], mine[4])
            add_policy_metrics(total, mine[1], mine[0], mine[3], mine[4], entropy=mine[2].abs(), ref_logprobs=mine[2])
        return total

    ranks = [[part] for part in data.draw(cuts(size))]
    whole = tally([list(range(size))]).compute()
    shares = run_ranks([lambda all_reduce, parts=parts: tally(parts).reduce(all_reduce).compute() for parts in ranks])
    for share in shares:
        assert share.keys() == whole.keys()
        found, expected = (torch.tensor(list(values.values()), dtype=torch.float64) for values in (share, whole))
        # the correlation divides by spreads that may be small
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
