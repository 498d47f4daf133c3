import functools
import math

import pytest
import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.policy_losses import clip_masks, policy_loss, ppo_clip

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
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequence_index: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return -advantages * logprobs, torch.ones_like(logprobs)


def test_by_name_or_own_callable():
    assert policy_loss("ppo_clip") is ppo_clip
    assert policy_loss(reinforce) is reinforce
    token = torch.ones(1)
    loss, _ = policy_loss(functools.partial(ppo_clip, clip_high=0.1))(token + 1, token, token)
    assert loss.item() == pytest.approx(-1.1, rel=1e-6)  # fp32
    with pytest.raises(ValueError, match="unknown policy loss 'ppo': choose one of ppo_clip"):
        policy_loss("ppo")
