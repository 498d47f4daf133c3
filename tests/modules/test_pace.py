"""Idle shares by hand."""

import pytest

from lightning_megatron_rl.modules.pace import idle_shares, sampling_rate
from lightning_megatron_rl.utilities.spans import Span, SpanLog


def shares(*arguments) -> tuple[float, float]:
    found = idle_shares(*arguments)
    return found["perf/trainer_idle_frac"], found["perf/sampler_idle_frac"]


def sampler() -> SpanLog:
    log = SpanLog()
    for span in (
        Span("sampling", 9.0, 11.0, 2.0, 20),
        Span("update", 11.0, 12.0, 1.0),
        Span("sampling", 12, 14, 1.5, 8),
    ):
        log.add(span)
    return log


def test_shares_are_of_the_step():
    """Of ten seconds the trainer waited four; its sampler drew tokens in one and in one and a half of them."""
    assert shares(10.0, 20.0, 4.0, sampler()) == (0.4, 0.75)
    assert sampling_rate(10.0, 20.0, sampler()) == {"perf/sampler_tokens_per_s": (10 + 8) / 10}


def test_what_a_sampler_has_not_told_yet_does_not_count_as_idle():
    log = sampler()
    log.known_until = 14.0
    assert shares(10.0, 20.0, 4.0, log)[1] == pytest.approx(1 - 2.5 / 4)
    assert sampling_rate(10.0, 20.0, log)["perf/sampler_tokens_per_s"] == pytest.approx(18 / 4)
    log.known_until = 9.5  # nothing of this step: then it is taken for all that there was
    assert shares(10.0, 20.0, 4.0, log)[1] == 0.75


def test_a_rank_that_leads_no_sampler_says_nothing_of_one():
    """0, which is no more than those that do."""
    assert shares(10.0, 20.0, 12.0, None) == (1.0, 0.0)
    assert sampling_rate(10.0, 20.0, None) == {"perf/sampler_tokens_per_s": 0.0}
