"""Losses of preference pairs: one number per side in, one loss per pair out, and the gradient that each side gets."""

from collections.abc import Callable

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
