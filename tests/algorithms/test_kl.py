import math

import pytest
import torch

from lightning_megatron_rl.algorithms.kl import KL_ESTIMATORS, k3_capped, kl_penalty


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # x = log π - log π_ref = 1, derivatives with respect to log π: 1, x, 1 - e^-x
        ("k1", 1.0, 1.0),
        ("k2", 0.5, 1.0),
        ("k3", math.exp(-1), 1 - math.exp(-1)),
    ],
)
def test_value_and_gradient_by_hand(estimator: str, value: float, gradient: float):
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    penalty = kl_penalty(logprobs, torch.tensor([-2.0], dtype=torch.float64), estimator)
    assert penalty.item() == pytest.approx(value, abs=1e-14)  # float64 rounding
    assert torch.autograd.grad(penalty.sum(), logprobs)[0].item() == pytest.approx(gradient, abs=1e-14)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expectation_is_the_kl_divergence(estimator: str):
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 7, generator=generator, dtype=torch.float64).log_softmax(-1)
    expected = (p.exp() * (p - q)).sum()
    assert expected > 0.05
    estimate = (p.exp() * kl_penalty(p, q, estimator)).sum()  # the exact expectation over samples of p
    torch.testing.assert_close(estimate, expected, rtol=1e-12, atol=0)  # float64 rounding


def test_k3_is_clamped_with_zero_gradient_and_stays_finite():
    logprobs = torch.tensor([-1e4, 0.0], requires_grad=True)
    penalty = kl_penalty(logprobs, torch.tensor([0.0, -1e4]), "k3")
    assert penalty[0].item() == 10.0
    assert penalty[1].item() == 10.0  # d = -20: e^-20 + 20 - 1 = 19, clamped
    (gradient,) = torch.autograd.grad(penalty.sum(), logprobs)
    assert gradient.tolist() == [0.0, 0.0]


def test_capped_tokens_are_those_without_a_gradient():
    """Over the whole range of differences, with and without the weight of an off-policy token."""
    difference = torch.linspace(-25, 25, 5001, dtype=torch.float64)
    logprobs = (-difference).requires_grad_()
    reference, old = torch.zeros_like(difference), logprobs.detach() - 0.3
    capped = k3_capped(logprobs, reference)
    assert torch.equal(
        capped, (difference > 2.611) | (difference < -10.9999)
    )  # e^d - d - 1 = 10 at 2.61095 and -10.99998
    assert not capped.requires_grad
    for weighted_by in (None, old):
        penalty = kl_penalty(logprobs, reference, "k3", old_logprobs=weighted_by)
        (gradient,) = torch.autograd.grad(penalty.sum(), logprobs)
        assert torch.equal(gradient[capped], torch.zeros(int(capped.sum()), dtype=torch.float64))
        assert (gradient[~capped & (difference != 0)] != 0).all()


def test_k3_keeps_its_digits_at_small_differences():
    difference = torch.tensor([3e-7, 1e-6, 3e-6], dtype=torch.float64)
    penalty = kl_penalty(-difference, torch.zeros(3, dtype=torch.float64), "k3")
    # d²/2 + d³/6; e^d - 1 - d written out has an error of 1e-16, 1e-3 of the smallest; with expm1 it is 1e-22
    torch.testing.assert_close(penalty, difference**2 / 2 + difference**3 / 6, rtol=1e-8, atol=0)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_equal_policies_have_none(estimator: str):
    logprobs = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kl_penalty(logprobs, logprobs.clone(), estimator), torch.zeros(2, 5))


def test_unknown_estimator():
    with pytest.raises(ValueError, match="unknown KL estimator 'k4': choose one of k1, k2, k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_importance_weighting_gives_value_and_gradient_of_the_kl_off_policy(estimator: str):
    """Samples of another policy: the exact expectation of the weighted estimate is KL(π || π_ref), and so its gradient.

    Without the weights neither is; k1's own gradient on policy is zero on average.
    """
    generator = torch.Generator().manual_seed(0)
    logits, old, q = torch.randn(3, 7, generator=generator, dtype=torch.float64).unbind()
    logits.requires_grad_()
    old, q = old.log_softmax(-1), q.log_softmax(-1)
    p = logits.log_softmax(-1)
    expected = (p.exp() * (p - q)).sum()
    (expected_gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
    estimate = (old.exp() * kl_penalty(p, q, estimator, old_logprobs=old)).sum()
    torch.testing.assert_close(estimate, expected, rtol=1e-12, atol=0)  # float64 rounding
    (gradient,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-14)
    unweighted = (old.exp() * kl_penalty(p, q, estimator)).sum()
    assert (unweighted - expected).abs() > 1e-2
    on_policy = (p.detach().exp() * kl_penalty(p, q, "k1")).sum()
    assert torch.autograd.grad(on_policy, logits)[0].abs().max() < 1e-15  # rounding


def test_expectations_by_monte_carlo():
    """The means of k1 and k3 over samples of π agree with the KL divergence; k3's scatter less; k2 is biased."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1)
    q = (p + 0.3 * torch.randn(7, generator=generator, dtype=torch.float64)).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum().item()
    drawn = torch.multinomial(p.exp(), 200_000, replacement=True, generator=generator)
    estimates = {name: kl_penalty(p[drawn], q[drawn], name) for name in ("k1", "k2", "k3")}
    for name in ("k1", "k3"):
        error = estimates[name].std().item() / len(drawn) ** 0.5
        assert abs(estimates[name].mean().item() - exact) < 4 * error, name  # four standard errors
    assert estimates["k3"].std() < estimates["k1"].std() / 2
    assert (estimates["k3"] >= 0).all()
    bias = (p.exp() * (p - q).square() / 2).sum().item()
    error = estimates["k2"].std().item() / len(drawn) ** 0.5
    assert abs(estimates["k2"].mean().item() - bias) < 4 * error


def absolute(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    return (logprobs - ref_logprobs).abs()


def test_estimator_of_the_users_own():
    for choice in (absolute, f"{__name__}.absolute"):
        assert kl_penalty(torch.zeros(1), torch.ones(1), choice).tolist() == [1.0]
