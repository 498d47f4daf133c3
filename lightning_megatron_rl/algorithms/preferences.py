"""Losses of preference pairs: one number per side in, one loss per pair out, and the gradient that each side gets."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

PairLoss = Callable[[Tensor, Tensor], Tensor]
"""``(chosen [pairs], rejected [pairs]) -> loss [pairs]``, differentiable in both."""


def bradley_terry(chosen: Tensor, rejected: Tensor, center_coef: float = 0.0) -> Tensor:
    """Return -log sigmoid(chosen - rejected) + center_coef (chosen + rejected)^2, ``[pairs]``.

    The first term is the likelihood of the preference (Bradley and Terry, 1952; Ouyang et al., arXiv:2203.02155), which
    leaves the scores' zero open; the second draws it to the middle (Eisenstein et al., arXiv:2312.09244).

    Example:
        Scores 1 and 0: ``log(1 + e^-1) = 0.3133``.
    """
    return -logsigmoid(chosen - rejected) + center_coef * (chosen + rejected).square()


def dpo_sigmoid(chosen: Tensor, rejected: Tensor, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Return -(1-e) log sigmoid(b (c - r)) - e log sigmoid(-b (c - r)), ``[pairs]``, of DPO (arXiv:2305.18290).

    Args:
        chosen: Log-ratio of policy and reference, summed over the response, ``[pairs]``.
        rejected: The same of the other response.
        beta: Strength of the tie to the reference, b.
        label_smoothing: Share of preferences that are the wrong way round, e (Mitchell, 2023: conservative DPO).

    Example:
        Equal log-ratios: ``log 2 = 0.6931``, whatever beta.
    """
    margin = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """Return (c - r - 1 / (2 b))^2, ``[pairs]``, of IPO (Azar et al., arXiv:2310.12036, eq. 17).

    Args:
        chosen: Log-ratio of policy and reference, averaged over the response's tokens, ``[pairs]``.
        rejected: The same of the other response.
        beta: Strength of the tie to the reference, b.

    Example:
        Equal log-ratios and beta 0.5: 1.
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


def hinge(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """Return max(0, 1 - b (c - r)), ``[pairs]``, of SLiC with a reference (arXiv:2305.10425, arXiv:2309.06657).

    Sides as in `dpo_sigmoid`, here and in all below.
    """
    return torch.relu(1 - beta * (chosen - rejected))


def exo_pair(chosen: Tensor, rejected: Tensor, beta: float = 0.1, label_smoothing: float = 1e-3) -> Tensor:
    """Return KL(q || p), q = [s(m), s(-m)], m = b (c - r), p = [1-e, e], of EXO (arXiv:2402.00856, eq. 16).

    It needs e > 0.
    """
    margin = beta * (chosen - rejected)
    preferred = torch.log1p(margin.new_tensor(-label_smoothing))
    other = torch.log(margin.new_tensor(label_smoothing))
    return torch.sigmoid(margin) * (logsigmoid(margin) - preferred) + torch.sigmoid(-margin) * (
        logsigmoid(-margin) - other
    )


def nca_pair(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """Return -log s(b c) - (log s(-b c) + log s(-b r)) / 2, ``[pairs]``, of NCA (arXiv:2402.05369)."""
    c, r = beta * chosen, beta * rejected
    return -logsigmoid(c) - (logsigmoid(-c) + logsigmoid(-r)) / 2


def robust(chosen: Tensor, rejected: Tensor, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Return ((e-1) log s(m) + e log s(-m)) / (1-2e), m = b (c - r), ``[pairs]``, of robust DPO (arXiv:2403.00409).

    Its mean is that of `dpo_sigmoid` without smoothing on the true preferences, if a share e of them was flipped.
    """
    margin, e = beta * (chosen - rejected), label_smoothing
    return ((e - 1) * logsigmoid(margin) + e * logsigmoid(-margin)) / (1 - 2 * e)


def bco_pair(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """Return -log s(b c) - log s(-b r), ``[pairs]``: BCO without its shift of rewards (arXiv:2404.04656)."""
    return -logsigmoid(beta * chosen) - logsigmoid(-beta * rejected)


def sppo_hard(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """Return (c - 1 / (2 b))^2 + (r + 1 / (2 b))^2, ``[pairs]``, of SPPO (arXiv:2405.00675, eq. 4.7).

    The chosen response is taken to win with a probability of 1.
    """
    return (chosen - 1 / (2 * beta)).square() + (rejected + 1 / (2 * beta)).square()


def apo_zero(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """Return 1 - s(b c) + s(b r), ``[pairs]``: raises c, lowers r (APO, arXiv:2408.06266, eq. 7)."""
    return torch.sigmoid(-beta * chosen) + torch.sigmoid(beta * rejected)


def apo_down(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """Return s(b c) + 1 - s(b (c - r)), ``[pairs]``: lowers c, and r further (APO, arXiv:2408.06266, eq. 8)."""
    return torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * (chosen - rejected))


def discopop(chosen: Tensor, rejected: Tensor, beta: float = 0.1, tau: float = 0.05) -> Tensor:
    """Return -(1 - g) log s(m) + g e^-m, m = b (c - r), g = s(m / tau), ``[pairs]``, of DiscoPOP (arXiv:2406.08414)."""
    margin = beta * (chosen - rejected)
    # as one exponential: of a pair far the wrong way round e^-m is inf where g is 0
    exponential = torch.exp(logsigmoid(margin / tau) - margin)
    return -torch.sigmoid(-margin / tau) * logsigmoid(margin) + exponential


class DPOLoss(NamedTuple):
    """A loss of DPO and what it takes beside the log-ratios of both sides and `beta`."""

    function: Callable[..., Tensor]
    averages: bool = False  # a side's log-ratio is its mean over the response's tokens, not their sum
    smooths: bool = False  # takes label_smoothing
    takes_tau: bool = False


DPO_LOSSES: dict[str, DPOLoss] = {
    "sigmoid": DPOLoss(dpo_sigmoid, smooths=True),
    "sigmoid_norm": DPOLoss(dpo_sigmoid, averages=True, smooths=True),
    "hinge": DPOLoss(hinge),
    "ipo": DPOLoss(ipo, averages=True),
    "exo_pair": DPOLoss(exo_pair, smooths=True),
    "nca_pair": DPOLoss(nca_pair),
    "robust": DPOLoss(robust, smooths=True),
    "bco_pair": DPOLoss(bco_pair),
    "sppo_hard": DPOLoss(sppo_hard),
    "apo_zero": DPOLoss(apo_zero),
    "apo_down": DPOLoss(apo_down),
    "discopop": DPOLoss(discopop, takes_tau=True),
}


def side_gradients(loss: PairLoss, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses of pairs and their derivatives by either side, each float64 ``[pairs]``.

    A loss L(c, r) of two sums c = sum_t x_t has dL/dx_t = dL/dc for every token: with the derivatives known, a backward
    pass over tokens needs nothing else of the pair, whose sides may lie in different micro-batches and on other ranks.

    Example:
        ``side_gradients(bradley_terry, torch.zeros(1), torch.zeros(1))`` gives 0.6931, -0.5 and 0.5.
    """
    with torch.enable_grad():
        sides = [side.detach().double().requires_grad_() for side in (chosen, rejected)]
        losses = loss(*sides)
        of_chosen, of_rejected = torch.autograd.grad(losses.sum(), sides)
    return losses.detach(), of_chosen, of_rejected
