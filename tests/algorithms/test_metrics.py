import functools
import math

import pytest
import torch

from lightning_megatron_rl.algorithms.metrics import add_mismatch_metrics, add_policy_metrics
from lightning_megatron_rl.algorithms.tally import Tally
from tests.algorithms.ranks import run_ranks

NAN = float("nan")
LN2 = math.log(2)


def mismatch(old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, float]:
    tally = Tally()
    add_mismatch_metrics(tally, old, rollout, mask)
    return {name.removeprefix("mismatch/"): value for name, value in tally.compute().items()}


def test_mismatch_by_hand():
    rollout = torch.tensor([-1.0, -2.0, -3.0, -2.0], dtype=torch.float64)
    delta = torch.tensor([0.0, LN2, 2 * LN2, -2 * LN2], dtype=torch.float64)  # w = 1, 2, 4, 1/4
    computed = mismatch(rollout + delta, rollout)
    k3 = [w - math.log(w) - 1 for w in (1.0, 2.0, 4.0, 0.25)]
    probabilities = torch.stack([(rollout + delta).exp(), rollout.exp()])
    expected = {
        "abs_logp_diff": 5 * LN2 / 4,
        "k3": sum(k3) / 4,
        "token_mult_prob_error": (1 + 2 + 4 + 4) / 4,
        "is_mean": 7.25 / 4,
        "is_max": 4.0,
        "ess": 7.25**2 / (4 * (1 + 4 + 16 + 1 / 16)),
        "pearson": torch.corrcoef(probabilities)[0, 1].item(),
    }
    oob = computed.pop("oob_frac")
    assert oob in (0.5, 0.75)  # 4 and 1/4 are out; 2 is on the bound, rounding decides
    assert computed == {name: pytest.approx(value, rel=1e-12) for name, value in expected.items()}  # float64 rounding


def test_out_of_bounds_fraction():
    rollout = torch.zeros(6)
    weights = torch.tensor([0.49, 0.51, 1.0, 1.99, 2.01, 30.0])
    assert mismatch(weights.log(), rollout)["oob_frac"] == 0.5


def test_equal_logprobs():
    logprobs = -torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    computed = mismatch(logprobs, logprobs.clone())
    assert computed.pop("pearson") == pytest.approx(1.0, abs=1e-12)  # float64 sums
    expected = {"abs_logp_diff": 0, "k3": 0, "token_mult_prob_error": 1, "is_mean": 1, "is_max": 1, "ess": 1}
    assert computed == expected | {"oob_frac": 0}


@pytest.mark.parametrize("size", [1, 2, 1001])
def test_correlation_of_a_constant_is_nan(size: int):
    logprobs = torch.full((size,), -0.7)
    assert math.isnan(mismatch(logprobs, logprobs.clone())["pearson"])
    assert math.isnan(mismatch(torch.linspace(-1, 0, size), logprobs)["pearson"])
    assert math.isnan(mismatch(logprobs, torch.linspace(-1, 0, size))["pearson"])


def test_effective_sample_size_of_one_dominating_token():
    old = torch.zeros(1000)
    old[0] = 15.0
    # w = e^15 against 999 of weight one: (Σ w)² / Σ w² is 1 + 6e-4 of them
    assert mismatch(old, torch.zeros(1000))["ess"] == pytest.approx(1e-3, rel=1e-3)


def test_no_tokens_are_nan():
    assert all(math.isnan(value) for value in mismatch(torch.empty(0), torch.empty(0)).values())


def policy(logprobs, old, advantages, mask=None, **options) -> dict[str, float]:
    tally = Tally()
    add_policy_metrics(tally, logprobs, old, advantages, mask, **options)
    return {name.removeprefix("policy/"): value for name, value in tally.compute().items()}


def test_policy_by_hand():
    ratio = torch.tensor([1.0, 0.5, 0.5, 2.0, 2.0, 1.25], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    old = torch.full((6,), -2.0, dtype=torch.float64)
    logprobs = (old + ratio.log()).requires_grad_()
    ref = logprobs.detach() + 1.0
    entropy = torch.arange(6.0).requires_grad_()
    options = {"clip_low": 0.2, "clip_high": 0.3, "entropy": entropy, "ref_logprobs": ref}
    assert policy(logprobs, old, advantages, **options) == {
        "kl_old": pytest.approx((ratio - ratio.log() - 1).mean().item(), rel=1e-12),  # float64 rounding
        "kl_ref": pytest.approx(math.e - 2, rel=1e-12),
        "kl_capped_frac": 0.0,
        "ratio_max": pytest.approx(2.0, rel=1e-12),
        "clip_frac_low": 1 / 6,
        "clip_frac_high": 1 / 6,
        "entropy": 2.5,
    }


def test_share_of_tokens_where_k3_has_no_gradient():
    """log π_ref - log π_θ = 5, 2.6, 2.7, -1 and, masked, 9: two of four are above 2.61."""
    difference, mask = torch.tensor([5.0, 2.6, 2.7, -1.0, 9.0]), torch.tensor([True] * 4 + [False])
    found = policy(-difference, -difference, torch.ones(5), mask, ref_logprobs=torch.zeros(5))
    assert found["kl_capped_frac"] == 0.5


def test_kl_directions():
    """kl_old is KL(π_old || π_θ) from samples of π_old; kl_ref is KL(π_θ || π_ref) from samples of π_θ."""
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log()
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    tokens = torch.tensor([0] * 7 + [1] * 2 + [2])  # each outcome in proportion to p: the mean is the expectation
    forward, reverse = (p.exp() * (p - q)).sum().item(), (q.exp() * (q - p)).sum().item()
    assert abs(forward - reverse) > 0.1
    zeros, expected = torch.zeros(10), pytest.approx(forward, rel=1e-12)  # float64 rounding
    assert policy(q[tokens], p[tokens], zeros)["kl_old"] == expected
    assert policy(p[tokens], p[tokens], zeros, ref_logprobs=q[tokens])["kl_ref"] == expected
    assert mismatch(q[tokens], p[tokens])["k3"] == expected


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(40, 5, generator=generator)
    old = rollout + 0.5 * torch.randn(40, 5, generator=generator)
    return {
        "rollout": rollout,
        "old": old,
        "new": old + 0.3 * torch.randn(40, 5, generator=generator),
        "ref": old + 0.3 * torch.randn(40, 5, generator=generator),
        "advantages": torch.randn(40, 5, generator=generator),
        "entropy": torch.rand(40, 5, generator=generator),
        "mask": torch.rand(40, 5, generator=generator) < 0.7,
    }


def add_all(tally: Tally, rows: dict[str, torch.Tensor]) -> None:
    add_mismatch_metrics(tally, rows["old"], rows["rollout"], rows["mask"])
    add_policy_metrics(
        tally,
        rows["new"],
        rows["old"],
        rows["advantages"],
        rows["mask"],
        entropy=rows["entropy"],
        ref_logprobs=rows["ref"],
    )


@pytest.fixture
def whole() -> dict[str, float]:
    """All metrics of the batch at once, from its valid tokens only."""
    rows = batch()
    tally = Tally()
    add_all(tally, {name: value[rows["mask"]] for name, value in rows.items()})
    return tally.compute()


def assert_metrics_equal(computed: dict[str, float], expected: dict[str, float]) -> None:
    # float64 sums of 200 numbers in another order
    assert computed == {name: pytest.approx(value, rel=1e-12) for name, value in expected.items()}


def test_every_conventional_name_is_there(whole: dict[str, float]):
    mismatch = "abs_logp_diff k3 token_mult_prob_error is_mean is_max ess oob_frac pearson"
    policy = "kl_old kl_ref kl_capped_frac entropy ratio_max clip_frac_low clip_frac_high"
    assert set(whole) == {f"mismatch/{x}" for x in mismatch.split()} | {f"policy/{x}" for x in policy.split()}
    assert all(math.isfinite(value) for value in whole.values())


@pytest.mark.parametrize("sizes", [[20, 20], [1, 39], [0, 13, 27], [10, 10, 10, 10]])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_any_cut_over_ranks_and_micro_batches_gives_the_same(
    whole: dict[str, float], sizes: list[int], micro_batches: int
):
    pieces = {name: value.split(sizes) for name, value in batch().items()}

    def rank(number: int, all_reduce) -> dict[str, float]:
        tally = Tally()
        for part in range(micro_batches):
            add_all(tally, {name: value[number][part::micro_batches] for name, value in pieces.items()})
        return tally.reduce(all_reduce).compute()

    results = run_ranks([functools.partial(rank, number) for number in range(len(sizes))])
    assert_metrics_equal(results[0], whole)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("garbage", [NAN, float("inf"), float("-inf"), 1e30])
def test_masked_positions_never_leak(whole: dict[str, float], garbage: float):
    rows = batch()
    rows = {
        name: value if name == "mask" else value.masked_fill(~rows["mask"], garbage) for name, value in rows.items()
    }
    tally = Tally()
    add_all(tally, rows)
    assert_metrics_equal(tally.compute(), whole)
