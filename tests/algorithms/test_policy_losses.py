import functools
import math

import pytest
import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.policy_losses import (
    POLICY_LOSSES,
    cispo,
    clip_masks,
    gspo,
    luspo,
    policy_loss,
    ppo_clip,
    sapo,
    vespo,
)
from lightning_megatron_rl.algorithms.sequences import Sequences

OPTIONS = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}


def loss_and_gradient(ratio: float, advantage: float, **options) -> tuple[float, float]:
    """Loss of one token and its gradient with respect to the current log-prob."""
    logprobs = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0], dtype=torch.float64)
    loss, _ = ppo_clip(logprobs, old, torch.tensor([advantage], dtype=torch.float64), **options)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return loss.item(), gradient.item()


# d loss / d logprob is -A r where the unclipped term is taken and 0 where a bound is: worked out by hand
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: the plain policy gradient
        (1.1, 2.0, -2.2, -2.2),  # inside the range
        (1.5, 2.0, -2.6, 0.0),  # above, A > 0: clipped at 1.3
        (0.5, 2.0, -1.0, -1.0),  # below, A > 0: still learns
        (0.9, -2.0, 1.8, 1.8),
        (0.5, -2.0, 1.6, 0.0),  # below, A < 0: clipped at 0.8
        (1.5, -2.0, 3.0, 3.0),  # above, A < 0: still learns
        (5.0, -2.0, 6.0, 0.0),  # far above, A < 0: dual clip at 3 x 2
        (5.0, 0.0, 0.0, 0.0),
    ],
)
def test_loss_and_gradient_by_hand(ratio: float, advantage: float, loss: float, gradient: float):
    # float64: exp(log r) returns r to a few units of rounding
    assert loss_and_gradient(ratio, advantage, **OPTIONS) == pytest.approx((loss, gradient), abs=1e-12)


def test_without_dual_clip():
    assert loss_and_gradient(5.0, -2.0, dual_clip=None) == pytest.approx((10.0, 10.0), abs=1e-12)


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_shapes_and_detached_ratio(shape: tuple[int, ...]):
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(shape, generator=generator).requires_grad_()
    old, advantages = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    loss, ratio = ppo_clip(logprobs, old, advantages)
    assert loss.shape == ratio.shape == shape
    assert loss.requires_grad
    assert not ratio.requires_grad
    torch.testing.assert_close(ratio, (logprobs - old).exp().detach())  # the same operations, default tolerance


def test_log_ratio_is_clamped():
    logprobs = torch.tensor([0.0, -1e4], requires_grad=True)
    loss, ratio = ppo_clip(logprobs, torch.tensor([-1e4, 0.0]), torch.tensor([-1.0, 1.0]), dual_clip=None)
    # fp32 exp is good to 1e-6 relative
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-6)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient.tolist() == [0.0, 0.0]


def test_clip_masks_are_where_the_range_cuts_the_gradient():
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(2000, generator=generator, dtype=torch.float64)
    logprobs = (old + 0.5 * torch.randn(2000, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(2000, generator=generator, dtype=torch.float64)
    loss, ratio = ppo_clip(logprobs, old, advantages, clip_low=0.2, clip_high=0.3, dual_clip=None)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    low, high = clip_masks(ratio, advantages, clip_low=0.2, clip_high=0.3)
    assert low.dtype == high.dtype == torch.bool
    assert low.sum() > 50
    assert high.sum() > 50
    assert not (low & high).any()
    assert torch.equal(low | high, gradient == 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 1.5}, r"\[1 - 1.5, 1 \+ 0.2\]"),
        ({"clip_low": -0.1}, "0 <= clip_low < 1"),
        ({"clip_high": -0.1}, "clip_high >= 0"),
        ({"dual_clip": 1.0}, "dual_clip=1.0 would clip ratios below 1"),
    ],
)
def test_bad_clip_ranges_are_refused(options: dict[str, float], message: str):
    token = torch.zeros(1)
    with pytest.raises(ValueError, match=message):
        ppo_clip(token, token, token, **options)


def reinforce(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Sequences | None = None
) -> tuple[Tensor, Tensor]:
    return -advantages * logprobs, torch.ones_like(logprobs)


def test_by_name_or_own_callable():
    assert policy_loss("ppo_clip") is ppo_clip
    assert policy_loss(reinforce) is reinforce
    token = torch.ones(1)
    loss, _ = policy_loss(functools.partial(ppo_clip, clip_high=0.1))(token + 1, token, token)
    assert loss.item() == pytest.approx(-1.1, rel=1e-6)  # fp32
    with pytest.raises(
        ValueError, match="unknown policy loss 'ppo': choose one of cispo, gspo, luspo, ppo_clip, sapo, vespo"
    ):
        policy_loss("ppo")


# ---- one ratio per sequence, capped weights, a soft gate -----------------------------------------------------------


def one_sequence(size: int) -> Sequences:
    return Sequences(torch.zeros(size, dtype=torch.long), torch.ones(size, dtype=torch.bool), 1)


def values_and_gradients(loss, differences: list[float], advantage: float, **options) -> tuple[list, list, list]:
    """Loss, ratio and gradient of each token of one sequence with these log-ratios."""
    logprobs = (torch.tensor(differences, dtype=torch.float64) - 1).requires_grad_()
    old, advantages = torch.full_like(logprobs, -1.0).detach(), torch.full_like(logprobs, advantage).detach()
    losses, ratio = loss(logprobs, old, advantages, one_sequence(len(differences)), **options)
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert not ratio.requires_grad
    return losses.tolist(), ratio.tolist(), gradient.tolist()


S = math.exp(0.3)  # of d = 0.2 and 0.4


@pytest.mark.parametrize(
    ("advantage", "options", "loss", "gradient"),
    [
        (2.0, {"clip_high": 0.5}, -2 * S, -2 * S),
        (2.0, {"clip_high": 0.1}, -2.2, 0.0),  # clipped: both tokens, though one alone (d = 0.2) is further inside
        (-2.0, {"clip_high": 0.1}, 2 * S, 2 * S),  # the other sign still learns
    ],
)
def test_gspo_by_hand(advantage: float, options: dict, loss: float, gradient: float):
    losses, ratio, gradients = values_and_gradients(gspo, [0.2, 0.4], advantage, **options)
    assert ratio == pytest.approx([S, S], rel=1e-14)  # float64 rounding of exp and a mean of two
    assert losses == pytest.approx([loss, loss], rel=1e-14)
    assert gradients == pytest.approx([gradient, gradient], rel=1e-14)


def test_gspo_token_form_has_the_gradient_of_the_sequence_form():
    """The mean over tokens of the token form against autograd of max(-A s, -A clip(s)) with s written out."""
    old = -torch.rand(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logprobs = (old + 0.02).requires_grad_()
    losses, _ = gspo(logprobs, old, torch.full_like(old, 0.7), one_sequence(5), clip_low=0.1, clip_high=0.1)
    s = (logprobs - old).mean().exp()
    plain = torch.maximum(-0.7 * s, -0.7 * s.clamp(0.9, 1.1))
    torch.testing.assert_close(losses.mean(), plain, rtol=1e-14, atol=0)  # float64 rounding
    ours, theirs = (torch.autograd.grad(loss, logprobs)[0] for loss in (losses.mean(), plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)


def test_luspo_has_the_gradient_of_the_length_times_the_sequence_form():
    old = -torch.rand(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logprobs = (old + 0.02).requires_grad_()
    losses, _ = luspo(logprobs, old, torch.full_like(old, 0.7), one_sequence(5), clip_low=0.1, clip_high=0.1)
    s = (logprobs - old).mean().exp()
    plain = 5 * torch.maximum(-0.7 * s, -0.7 * s.clamp(0.9, 1.1))
    torch.testing.assert_close(losses.sum(), plain, rtol=1e-14, atol=0)  # float64 rounding
    ours, theirs = (torch.autograd.grad(loss, logprobs)[0] for loss in (losses.sum(), plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("advantage", "options", "log_phi"),
    [
        (1.0, {}, 3 + 2 * math.log(2) - 6),  # w = 2 x 1
        (-1.0, {}, 2 + 3 * math.log(2) - 4),
        (1.0, {"k_positive": 0.0, "lambda_positive": 0.5}, 0.5 - 1),
        (1.0, {"correction_weights": [0.5, 1.0]}, 0.0),  # w = 2 x 0.5 x 1
        (1.0, {"correction_weights": [0.25, 0.25]}, 3 + 2 * math.log(0.125) - 0.375),
        (1.0, {"correction_weights": [0.0, 1.0]}, 3 + 2 * math.log(2e-8) - 6e-8),  # rejected: 1e-8 in place of 0
    ],
)
def test_vespo_by_hand(advantage: float, options: dict, log_phi: float):
    """The gradient by log π is -φ A: φ has none."""
    if "correction_weights" in options:
        options = {**options, "correction_weights": torch.tensor(options["correction_weights"], dtype=torch.float64)}
    losses, _, gradients = values_and_gradients(vespo, [math.log(2), 0.0], advantage, **options)
    phi = math.exp(log_phi)
    # float64, of exponents of up to 40
    assert gradients == pytest.approx([-phi * advantage] * 2, rel=1e-13)
    assert losses == pytest.approx([-phi * advantage * (math.log(2) - 1), phi * advantage], rel=1e-13)


def test_vespo_weights_nothing_with_inf_or_nan():
    for difference in (1e4, -1e4):
        losses, ratio, gradients = values_and_gradients(vespo, [difference, difference], 1.0)
        assert ratio == pytest.approx([math.exp(20) if difference > 0 else 1e-8] * 2, rel=1e-12)
        assert all(math.isfinite(value) and abs(value) < 1e-9 for value in (*losses, *gradients))


@pytest.mark.parametrize("loss", [gspo, luspo, vespo])
def test_losses_of_sequences_need_to_know_them(loss):
    token = torch.zeros(1)
    with pytest.raises(ValueError, match=f"{loss.__name__} has one ratio per sequence: pass `sequences`"):
        loss(token, token, token)


def test_cispo_by_hand():
    """Both tokens learn, the second one (r = 9) with the weight 5; d loss / d log π is -weight · A."""
    losses, ratio, gradients = values_and_gradients(cispo, [math.log(2), math.log(9)], 3.0, clip_high=4.0)
    assert ratio == pytest.approx([2, 9], rel=1e-14)
    assert losses == pytest.approx([-2 * 3 * (math.log(2) - 1), -5 * 3 * (math.log(9) - 1)], rel=1e-14)
    assert gradients == pytest.approx([-6, -15], rel=1e-14)


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05)])
@pytest.mark.parametrize("ratio", [1.0, 0.5, 3.0])
def test_sapo_by_hand(advantage: float, tau: float, ratio: float):
    """σ' = σ (1 - σ), and dr / d log π = r; at r = 1 the gradient is -A whatever τ."""
    losses, _, gradients = values_and_gradients(sapo, [math.log(ratio)], advantage)
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert losses == pytest.approx([-advantage * gate * 4 / tau], rel=1e-14)
    assert gradients == pytest.approx([-advantage * 4 * gate * (1 - gate) * ratio], rel=1e-13)
    if ratio == 1.0:
        assert gradients == pytest.approx([-advantage], rel=1e-13)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_gradient_is_the_policy_gradient(name: str):
    """At π = π_old every loss has the gradient -A of REINFORCE: they differ only once the policy has moved."""
    _, ratio, gradients = values_and_gradients(POLICY_LOSSES[name], [0.0, 0.0, 0.0], 0.7)
    assert ratio == [1.0, 1.0, 1.0]
    assert gradients == pytest.approx([-0.7] * 3, rel=1e-14)


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (gspo, {"clip_low": 1.5}, r"\[1 - 1.5, 1 \+ 0.0004\]"),
        (luspo, {"clip_low": 1.5}, r"\[1 - 1.5, 1 \+ 0.0025\]"),
        (vespo, {"k_negative": -0.5}, "k_negative=-0.5 and lambda_negative=2.0: choose k >= 0 and λ > 0"),
        (vespo, {"lambda_positive": math.inf}, "k_positive=2.0 and lambda_positive=inf"),
        (vespo, {"k_positive": 30.0, "lambda_positive": 1.0}, r"w = k / λ = 30 would be weighted with .* = e\^73"),
        (cispo, {"clip_high": -0.1}, "clip_high >= 0"),
        (sapo, {"tau_positive": 0.0}, "tau_positive=0.0 and tau_negative=1.05 must be positive"),
    ],
)
def test_bad_options_are_refused(loss, options: dict[str, float], message: str):
    token = torch.zeros(1)
    with pytest.raises(ValueError, match=message):
        loss(token, token, token, one_sequence(1), **options)
