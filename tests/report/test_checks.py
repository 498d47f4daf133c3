"""Known diseases: each is found in a series that has it, and in none that has not."""

import numpy as np
import pytest

from lightning_megatron_rl.report.checks import CHECKS, check_run
from lightning_megatron_rl.report.series import Series
from tests.report.runs import healthy

STEPS = 100


def run(**changed: np.ndarray | float) -> dict[str, Series]:
    """Healthy metrics but for some, by their names with __ for /; None leaves one out."""
    rows = [healthy(step) for step in range(1, STEPS + 1)]
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    for name, values in changed.items():
        columns[name.replace("__", "/")] = np.broadcast_to(np.asarray(values, dtype=float), STEPS)
    return {name: Series(np.arange(1.0, STEPS + 1), values) for name, values in columns.items()}


def level(metrics: dict[str, Series], name: str) -> str:
    (found,) = [finding for finding in check_run(metrics) if finding.name == name]
    return found.level


def ramp(begin: float, end: float) -> np.ndarray:
    return np.linspace(begin, end, STEPS)


def test_a_healthy_run_has_none():
    assert {finding.level for finding in check_run(run())} == {"ok"}


@pytest.mark.parametrize(
    ("name", "expected", "changed"),
    [
        ("entropy collapse", "warning", {"policy__entropy": ramp(0.5, 0.1)}),
        ("entropy collapse", "problem", {"policy__entropy": np.geomspace(0.5, 0.005, STEPS)}),
        ("entropy collapse", "problem", {"policy__entropy": ramp(0.5, 0.0)}),
        ("entropy collapse", "ok", {"policy__entropy": ramp(0.5, 0.3)}),
        # certainty about solved prompts is no disease
        ("entropy collapse", "ok", {"policy__entropy": ramp(0.5, 0.0), "reward__mean": ramp(0.2, 0.99)}),
        ("length explosion", "warning", {"rollout__response_len_mean": ramp(100, 400)}),
        ("length explosion", "problem", {"rollout__response_len_mean": ramp(100, 400), "reward__mean": 0.3}),
        (
            "length explosion",
            "problem",
            {"rollout__response_len_mean": ramp(100, 400), "rollout__truncated_frac": ramp(0, 0.6)},
        ),
        (
            "length explosion",
            "problem",
            {"rollout__response_len_mean": ramp(100, 400), "rollout__repetition_frac": ramp(0, 0.9)},
        ),
        ("length explosion", "ok", {"rollout__response_len_mean": ramp(100, 150)}),
        ("truncated share", "warning", {"rollout__truncated_frac": ramp(0, 0.2)}),
        ("truncated share", "problem", {"rollout__truncated_frac": ramp(0, 0.5)}),
        ("mismatch drift", "warning", {"mismatch__abs_logp_diff": ramp(0.002, 0.03)}),
        ("mismatch drift", "ok", {"mismatch__abs_logp_diff": ramp(1e-6, 1e-5)}),  # still rounding
        ("mismatch drift", "problem", {"mismatch__token_mult_prob_error": ramp(1.0, 1.2)}),
        ("dead groups", "warning", {"reward__zero_spread_frac": ramp(0.2, 0.75)}),
        ("dead groups", "problem", {"reward__zero_spread_frac": ramp(0.2, 0.99)}),
        ("no number", "warning", {"policy__grad_norm": np.where(np.arange(STEPS) == 40, np.inf, 1.0)}),
        ("no number", "warning", {"policy__loss": np.where(np.arange(STEPS) == 99, np.nan, 1.0)}),  # may go on
        ("no number", "problem", {"policy__loss": np.where(np.arange(STEPS) > 60, np.nan, 1.0)}),
        ("no number", "problem", {"reward__mean": np.nan}),
        ("KL run-away", "ok", {"policy__kl_ref": ramp(0, 0.2)}),
        ("KL run-away", "warning", {"policy__kl_ref": ramp(0.2, 0.5)}),
        ("KL run-away", "problem", {"policy__kl_ref": ramp(0, 3)}),
        ("KL run-away", "problem", {"policy__kl_ref": np.geomspace(0.0005, 0.5, STEPS)}),
        ("KL run-away", "warning", {"policy__kl_old": ramp(0.001, 0.4)}),
    ],
)
def test_a_disease_is_found_where_it_is(name, expected, changed):
    metrics = run(**changed)
    assert level(metrics, name) == expected
    (found,) = [finding for finding in check_run(metrics) if finding.name == name]
    assert any(metric.replace("__", "/") in found.evidence for metric in changed)
    assert any(character.isdigit() for character in found.evidence)
    assert found.advice or found.level == "ok"


@pytest.mark.parametrize("left", [0, 3, 9])
def test_too_few_steps_are_no_evidence(left):
    metrics = {name: Series(series.steps[:left], series.values[:left]) for name, series in run().items()}
    assert {finding.level for finding in check_run(metrics)} == {"unknown"}
    assert {finding.level for finding in check_run({})} == {"unknown"}


def test_a_loss_that_is_no_number_is_told_of_at_once():
    (found,) = [
        one
        for one in check_run({"sft/loss": Series(np.array([1.0, 2.0]), np.array([1.0, np.nan]))})
        if (one.name == "no number")
    ]
    assert (found.level, found.evidence) == ("warning", "sft/loss is no number in 1 of 2 steps, first in 2")


def test_values_that_are_no_numbers_are_left_out():
    entropy = ramp(0.5, 0.3)
    entropy[::2] = np.nan
    entropy[1::10] = np.inf
    assert level(run(policy__entropy=entropy), "entropy collapse") == "ok"
    assert level(run(policy__entropy=np.nan), "entropy collapse") == "unknown"


def test_the_worst_comes_first_and_every_check_has_a_name_of_its_own():
    findings = check_run(run(reward__zero_spread_frac=ramp(0.2, 0.99)))
    assert findings[0].name == "dead groups"
    assert len({finding.name for finding in findings}) == len(CHECKS)
