"""Looks for known diseases of reinforcement learning in the metrics of a run, with evidence and advice.

Each check is a function of the metrics. Beginning and end are the first and the last tenth of the run. The bounds are
rules of thumb: a finding says where to look, not what is wrong.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_megatron_rl.report.series import LEAST_STEPS, Series

Metrics = Mapping[str, Series]
Level = Literal["ok", "warning", "problem", "unknown"]

ENTROPY_KEPT = (0.3, 0.1)  # end / beginning: below these a warning, a problem
SOLVED = 0.9  # of the largest reward seen: entropy may fall
LENGTH_GROWTH = 2.0  # end / beginning
TRUNCATED = (0.1, 0.3)  # share of responses
MISMATCH_ERROR = 1.05  # mean of e^|difference of log-probs|
MISMATCH_GROWTH, MISMATCH_NOISE = 3.0, 0.01  # end / beginning; nats that rounding explains
DEAD_GROUPS = (0.6, 0.9)  # share of prompts
KL_REFERENCE = (0.3, 1.0)  # nats per token
KL_GROWTH = 5.0  # second half / first half
WATCHED = ("/loss", "/grad_norm", "reward/mean")
NEVER_AGAIN = 3  # last steps without a number
KL_OLD = 0.1  # nats per token within one rollout


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    Attributes:
        name: The disease.
        level: "ok", "warning", "problem", or "unknown" where the metrics are not there.
        evidence: The numbers.
        advice: What to do; "" if nothing.
    """

    name: str
    level: Level
    evidence: str
    advice: str = ""


def check_run(metrics: Metrics) -> list[Finding]:
    """Return the findings of all checks, the worst first."""
    order = ("problem", "warning", "ok", "unknown")
    return sorted((check(metrics) for check in CHECKS), key=lambda finding: order.index(finding.level))


def check_numbers(metrics: Metrics) -> Finding:
    """No number: a loss, gradient norm or reward is infinite or nan. It is told of after any number of steps."""
    name, evidence, last = "no number", [], False
    watched = {metric: metrics[metric] for metric in sorted(metrics) if metric.endswith(WATCHED)}
    for metric, series in watched.items():
        wrong = ~np.isfinite(series.values)
        if wrong.any():
            first = series.steps[wrong][0]
            evidence.append(f"{metric} is no number in {wrong.sum()} of {wrong.size} steps, first in {first:.0f}")
            last = last or bool(wrong[-NEVER_AGAIN:].all())
    if not evidence and not any(series.is_long() for series in watched.values()):
        return _unknown(name, " or ".join(WATCHED))
    return Finding(
        name,
        "problem" if last else "warning" if evidence else "ok",
        "; ".join(evidence)
        or f"{', '.join(watched)}: finite in all {max(s.steps.size for s in watched.values())} steps",
        "Such steps change no weights. If they do not end, look at the samples of the first one, lower the learning"
        " rate, and set gradient_clip_val. With 16-mixed one now and then is how it finds its loss scale.",
    )


def check_entropy(metrics: Metrics) -> Finding:
    """Entropy collapse: the policy hardly varies its answers any more although it does not get them right."""
    name, metric = "entropy collapse", "policy/entropy"
    if (entropy := _long(metrics, metric)) is None:
        return _unknown(name, metric)
    start, end = entropy.start(), entropy.end()
    evidence = f"{metric} went from {start:.3g} to {end:.3g} nats"
    level = _level(-end, -ENTROPY_KEPT[0] * start, -ENTROPY_KEPT[1] * start)
    reward, most = _long(metrics, "reward/mean"), metrics.get("reward/max")
    if level != "ok" and reward is not None and most is not None and most.finite().values.size:
        top, reached = float(most.finite().values.max()), reward.end()
        evidence += f"; reward/mean is at {reached:.3g}, the largest reward was {top:.3g}"
        if top > 0 and reached >= SOLVED * top:
            return Finding(name, "ok", f"{evidence}: the prompts are solved, and certainty is what is left")
    return Finding(
        name,
        level,
        evidence,
        "Samples of a group are nearly alike, so there is little to learn from. Raise loss.clip_high (DAPO: 0.28), add"
        " a small loss.entropy_coef, lower the learning rate, or sample at temperature 1.",
    )


def check_length(metrics: Metrics) -> Finding:
    """Length explosion: responses grow and the reward does not."""
    name, metric = "length explosion", "rollout/response_len_mean"
    if (length := _long(metrics, metric)) is None:
        return _unknown(name, metric)
    start, end = length.start(), length.end()
    evidence = f"{metric} went from {start:.4g} to {end:.4g} tokens"
    if end < LENGTH_GROWTH * max(start, 1.0):
        return Finding(name, "ok", evidence)
    reward, level = _long(metrics, "reward/mean"), "warning"
    if reward is not None:
        evidence += f", reward/mean from {reward.start():.3g} to {reward.end():.3g}"
        level = "warning" if reward.end() > reward.start() else "problem"
    for other, bound in (("rollout/truncated_frac", TRUNCATED[1]), ("rollout/repetition_frac", 0.5)):
        if (series := _long(metrics, other)) is not None:
            evidence += f"; {other} is {series.end():.2f}"
            level = "problem" if series.end() >= bound else level
    return Finding(
        name,
        "problem" if level == "problem" else "warning",
        evidence,
        "Read the longest samples. Longer reasoning that earns reward is fine. Otherwise set overlong (a penalty), add"
        " a LengthPenalty reward, or use loss.aggregation: token_mean.",
    )


def check_truncation(metrics: Metrics) -> Finding:
    """Truncated share: the token limit cuts responses, whose reward then says little."""
    name, metric = "truncated share", "rollout/truncated_frac"
    if (share := _long(metrics, metric)) is None:
        return _unknown(name, metric)
    start, end = share.start(), share.end()
    return Finding(
        name,
        _level(end, *TRUNCATED),
        f"{metric} went from {start:.2f} to {end:.2f}",
        "Raise sampling.max_tokens and the engine's max_model_len, or shorten responses (overlong, LengthPenalty). A"
        " response that was cut has no answer yet, and is judged as if it were wrong.",
    )


def check_mismatch(metrics: Metrics) -> Finding:
    """Mismatch drift: trainer and sampler give the same tokens ever more different log-probs."""
    name, metric = "mismatch drift", "mismatch/abs_logp_diff"
    if (difference := _long(metrics, metric)) is None:
        return _unknown(name, metric)
    start, end = difference.start(), difference.end()
    evidence = f"{metric} went from {start:.2g} to {end:.2g} nats"
    drifts = end >= MISMATCH_GROWTH * start and end > MISMATCH_NOISE
    level: Level = "warning" if drifts else "ok"
    if (error := _long(metrics, "mismatch/token_mult_prob_error")) is not None:
        evidence += f"; mismatch/token_mult_prob_error is {error.end():.3f} (at most {MISMATCH_ERROR} is healthy)"
        level = "problem" if error.end() > MISMATCH_ERROR else level
    if (age := metrics.get("rollout/staleness_mean")) is not None and age.finite().values.size and age.end() > 0:
        evidence += f"; tokens are {age.end():.1f} versions old, which is part of it"
    return Finding(
        name,
        level,
        evidence,
        "Set loss.correction (tis, icepop). Give engine and trainer the same precision. With streaming lower"
        " max_staleness. If it began with the first step, run verify-layout: the two may not compute the same model.",
    )


def check_groups(metrics: Metrics) -> Finding:
    """Dead groups: all samples of a prompt get the same reward, so the prompt teaches nothing."""
    name, metric = "dead groups", "reward/zero_spread_frac"
    if (share := _long(metrics, metric)) is None:
        return _unknown(name, metric)
    end, evidence = share.end(), f"{metric} went from {share.start():.2f} to {share.end():.2f}"
    if (passed := _long(metrics, "reward/pass_at_k")) is not None:
        evidence += f"; {passed.end():.2f} of the prompts have a sample with reward"
    return Finding(
        name,
        _level(end, *DEAD_GROUPS),
        evidence,
        "If nearly all prompts are solved, they are too easy: take harder ones. If none is, they are too hard: warm up"
        " by SFT, take easier ones, raise num_generations. dynamic_sampling draws prompts until enough groups differ.",
    )


def check_kl(metrics: Metrics) -> Finding:
    """KL run-away: the policy leaves the reference, or one rollout's updates move it too far."""
    name = "KL run-away"
    reference, old = _long(metrics, "policy/kl_ref"), _long(metrics, "policy/kl_old")
    if reference is None and old is None:
        return _unknown(name, "policy/kl_ref or policy/kl_old")
    evidence, level = [], "ok"
    if reference is not None:
        values, end = reference.finite().values, reference.end()
        first, second = (half.mean() for half in (values[: len(values) // 2], values[len(values) // 2 :]))
        evidence.append(f"policy/kl_ref went from {reference.start():.2g} to {end:.2g} nats per token")
        level = _level(end, *KL_REFERENCE)
        if level == "warning" and second >= KL_GROWTH * first:
            level = "problem"
            evidence.append(f"its second half is {second / max(first, 1e-12):.0f} times its first")
    if old is not None:
        evidence.append(f"policy/kl_old, within one rollout, is {old.end():.2g}")
        level = "warning" if level == "ok" and old.end() > KL_OLD else level
    return Finding(
        name,
        level,  # type: ignore[arg-type]
        "; ".join(evidence),
        "Lower the learning rate or updates_per_rollout, raise loss.kl_coef, and set gradient_clip_val. If kl_ref grows"
        " while a held-out score falls, the reward is being gamed: read samples with high rewards.",
    )


CHECKS: tuple[Callable[[Metrics], Finding], ...] = (
    check_numbers,
    check_entropy,
    check_length,
    check_truncation,
    check_mismatch,
    check_groups,
    check_kl,
)


def _long(metrics: Metrics, name: str) -> Series | None:
    """Return a metric that has enough steps."""
    series = metrics.get(name)
    return series if series is not None and series.is_long() else None


def _unknown(name: str, metric: str) -> Finding:
    return Finding(name, "unknown", f"{metric} was not logged for {LEAST_STEPS} steps")


def _level(value: float, warning: float, problem: float) -> Level:
    return "problem" if value >= problem else "warning" if value >= warning else "ok"
