"""How far the ranks of a layout are from the single process, and what departs first."""

import math
import re
from collections.abc import Iterable, Sequence

import torch

from lightning_megatron_rl.verify.job import Measurement
from lightning_megatron_rl.verify.layouts import Layout
from lightning_megatron_rl.verify.report import Row

# Losses of a first policy update cancel to nearly nothing: below this they are compared against it.
_LOSS_FLOOR = 0.1


def make_row(layout: Layout, ranks: list[Measurement], reference: Measurement, tolerance: float) -> Row:
    """Return the row of a layout that ran to its end.

    Everything is relative: losses and gradient norms to the reference's, log-probs to the largest log-prob of the
    batch, each weight to its norm.

    Args:
        layout: The layout.
        ranks: What its ranks saw.
        reference: What the single process saw.
        tolerance: Largest relative difference.
    """
    first = ranks[0]
    logprob_error, worst_token = _logprob_error(ranks, reference)
    findings = [
        *_rank_findings(ranks),
        *_logprob_findings(logprob_error, worst_token, reference, tolerance),
    ]
    for step in range(len(reference.losses)):
        found = _step_findings(step, first, reference, tolerance)
        findings += found
        if found:  # a wrong step makes all later ones wrong
            break
    return Row(
        layout=layout.name,
        world_size=layout.world_size,
        verdict="departs" if findings else "same",
        reason="; ".join(findings),
        losses=first.losses,
        grad_norms=first.grad_norms,
        metrics=first.metrics,
        logprob_error=logprob_error,
        weight_error=_largest(first.weight_errors[-1].values()),
        checksum=first.checksum,
        step_s=max(rank.step_s for rank in ranks),
        peak_memory_gb=max(rank.peak_memory_gb for rank in ranks),
    )


def reference_row(layout: Layout, reference: Measurement) -> Row:
    """Return the single process's own row."""
    row = make_row(layout, [reference], reference, tolerance=0.0)
    row.verdict, row.reason = "reference", ""
    return row


def model_order(name: str) -> tuple[int, list[int], str]:
    """Sort key of a Hugging Face parameter: embeddings, layers by number, what follows them.

    Example:
        ``sorted(names, key=model_order)`` begins with ``model.embed_tokens.weight`` and ends with ``lm_head.weight``.
    """
    numbers = [int(number) for number in re.findall(r"\.(\d+)\.", name)]
    place = 1 if numbers else 0 if "embed" in name else 2
    within = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp", "norm", "lm_head")
    part = next((index for index, word in enumerate(within) if word in name), len(within))
    return place, [*numbers[:1], part, *numbers[1:]], name


def _rank_findings(ranks: Sequence[Measurement]) -> list[str]:
    """All ranks must report the same numbers, or `monitor=` and EarlyStopping would tear a run apart."""
    for rank in ranks[1:]:
        for step, (mine, first) in enumerate(zip(rank.losses, ranks[0].losses, strict=True), 1):
            if mine != first and not (math.isnan(mine) and math.isnan(first)):
                return [f"step {step}: rank {rank.rank} reports loss {mine:.9g}, rank 0 {first:.9g}"]
    return []


def _logprob_error(ranks: Sequence[Measurement], reference: Measurement) -> tuple[float, tuple[int, int]]:
    """Largest difference over all ranks, and its sequence and token."""
    worst, where = 0.0, (0, 0)
    for rank in ranks:
        for index, logprobs in rank.logprobs.items():
            difference = (logprobs - reference.logprobs[index]).abs()
            token = int(torch.where(difference.isnan(), math.inf, difference).argmax())
            value = float(difference[token])
            if math.isnan(value):
                return value, (index, token)
            if value > worst:
                worst, where = value, (index, token)
    return worst, where


def _logprob_findings(error: float, where: tuple[int, int], reference: Measurement, tolerance: float) -> list[str]:
    scale = max(1.0, max(float(logprobs.abs().max()) for logprobs in reference.logprobs.values()))
    if error <= tolerance * scale:
        return []
    sequence, token = where
    return [f"the log-prob of token {token} of sequence {sequence} is off by {error:.2e} before the first step"]


def _step_findings(step: int, mine: Measurement, theirs: Measurement, tolerance: float) -> list[str]:
    findings = []
    for name, value, expected, scale in (
        ("loss", mine.losses[step], theirs.losses[step], max(abs(theirs.losses[step]), _LOSS_FLOOR)),
        ("gradient norm", mine.grad_norms[step], theirs.grad_norms[step], abs(theirs.grad_norms[step])),
    ):
        if not abs(value - expected) <= tolerance * scale:  # not: nan departs
            findings.append(f"{name} {value:.7g} instead of {expected:.7g} ({_relative(value, expected, scale)})")
    errors = mine.weight_errors[step]
    beyond = sorted((name for name, error in errors.items() if not error <= tolerance), key=model_order)
    if beyond:
        others = f", first in model order of {len(beyond)} of {len(errors)} parameters" if len(beyond) > 1 else ""
        findings.append(f"{beyond[0]} departs by {errors[beyond[0]]:.2e}{others}")
    elif findings:
        largest = max(errors, key=lambda name: errors[name])
        findings.append(f"no parameter departs; the largest difference is {errors[largest]:.2e} in {largest}")
    return [f"step {step + 1}: {', '.join(findings)}"] if findings else []


def _relative(value: float, expected: float, scale: float) -> str:
    return f"{abs(value - expected) / scale:.2e} relative"


def _largest(values: Iterable[float]) -> float:
    listed = list(values)
    return math.nan if any(math.isnan(value) for value in listed) else max(listed)
