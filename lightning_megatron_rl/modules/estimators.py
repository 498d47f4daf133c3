"""Estimators of an evaluation with several responses per prompt: pass@k, majority vote, and their intervals."""

import math
from collections.abc import Hashable, Sequence
from functools import cache
from statistics import NormalDist


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of `k` responses is right, from `num_samples` drawn ones.

    1 - C(n - c, k) / C(n, k): the share of all choices of k among the n responses that hold one of the c right ones
    (Chen et al. 2021, arXiv 2107.03374, equation 1). 1 - (1 - c/n)^k would be too low.

    Raises:
        ValueError: k is not in [1, n], or c not in [0, n].

    Example:
        ``pass_at_k(4, 2, 2) == 5 / 6``: of the 6 pairs one holds no right response.
    """
    if not (1 <= k <= num_samples and 0 <= num_right <= num_samples):
        raise ValueError(f"pass@{k} of {num_samples} samples, {num_right} of them right: 1 <= k <= n and 0 <= c <= n")
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority_vote(answers: Sequence[Hashable | None], right: Sequence[bool]) -> float:
    """Return whether the answer that most responses give is right, 1.0 or 0.0.

    Where several answers have as many votes it is the mean over them, what breaking the tie at random would give on
    average. If responses with one answer are not all right or all wrong, it is their share. None is no vote, unless
    nothing else was given: then it is 0.0.

    Raises:
        ValueError: not as many answers as verdicts.

    Example:
        ``majority_vote(["7", "7", "8"], [True, True, False]) == 1.0``; with the answers "7" and "8" it is 0.5.
    """
    if len(answers) != len(right):
        raise ValueError(f"{len(answers)} answers, {len(right)} verdicts: one for each response")
    votes: dict[Hashable, list[bool]] = {}
    for answer, verdict in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(verdict)
    if not votes:
        return 0.0
    most = max(len(verdicts) for verdicts in votes.values())
    winners = [sum(verdicts) / most for verdicts in votes.values() if len(verdicts) == most]
    return sum(winners) / len(winners)


def score_interval(total: float, squares: float, count: float, confidence: float) -> tuple[float, float]:
    """Return the Wilson score interval of the mean of `count` values in [0, 1], from their sum and sum of squares.

    Of values 0 and 1 it is Wilson's interval (1927). Of others, such as a prompt's pass@k, the number of values is
    divided by their variance's share of p(1 - p), the variance of zeros and ones with their mean, as for the design
    effect of a survey. It never leaves [0, 1] and is not empty when all values agree. No values give nan.

    Example:
        ``score_interval(8, 8, 10, 0.95)`` is (0.490, 0.943): 8 of 10 right.
    """
    if not count:
        return math.nan, math.nan
    p = min(max(total / count, 0.0), 1.0)
    most = p * (1 - p)
    variance = squares / count - p * p
    # equal values other than 0 and 1 would be infinitely many: their number says more about it than their spread
    n = count * most / variance if most > 0 and variance > 1e-12 else count
    z2 = _quantile(confidence) ** 2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (most / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def mean_interval(total: float, squares: float, count: float, confidence: float) -> tuple[float, float]:
    """Return the normal interval of a mean over `count` values, mean ± z·s/√n with the unbiased s; nan below 2 values.

    Example:
        ``mean_interval(6.0, 14.0, 3, 0.95)`` is 2 ± 1.96 / √3, of the values 1, 2, 3.
    """
    if count < 2:
        return math.nan, math.nan
    mean = total / count
    variance = max(squares - total * mean, 0.0) / (count - 1)
    half = _quantile(confidence) * math.sqrt(variance / count)
    return mean - half, mean + half


@cache
def _quantile(confidence: float) -> float:
    """z of a two-sided interval: 1.96 for 0.95."""
    return NormalDist().inv_cdf((1 + confidence) / 2)
