"""Compares the ranks of a layout with the single process, and names the first departure."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from lightning_megatron_rl.verify.job import Measurement
from lightning_megatron_rl.verify.layouts import Layout
from lightning_megatron_rl.verify.report import Row

# Losses of a first policy update cancel to nearly nothing: below this they are compared against it.
_LOSS_FLOOR = 0.1
_EPS = 2.0**-23  # relative spacing of fp32
# How much further from the reference a layout may be than a single process whose weights were moved by rounding errors.
# Of seven families in nine layouts, gradients were 4.7 times as far at most, where that was below the tolerance, and
# 1.5 times above it. The noise of weights includes the rounding errors that they began with: 1.1 times as far.
_GRADIENT_NOISE, _WEIGHT_NOISE = 10.0, 4.0
_DUST = 1e-9  # of the norm of all gradients: what is smaller is the rounding of sums that cancel
SENSITIVITY = 1e-3  # relative error of one parameter's gradient that is to be named


def make_row(
    layout: Layout,
    ranks: list[Measurement],
    reference: Measurement,
    tolerance: float,
    noise: Measurement | None = None,
) -> Row:
    """Return the row of a layout that ran to its end.

    Losses and gradient norms are compared relative to the reference's, log-probs to the largest log-prob of the batch.
    The gradient of each parameter and what its weights moved are held to their own norms and to their own noise.

    Args:
        layout: The layout.
        ranks: What its ranks saw.
        reference: What the single process saw.
        tolerance: Largest relative difference.
        noise: What the single process saw when its weights were moved by rounding errors first, as `largest_noise`
            has it; None for no noise.
    """
    first = ranks[0]
    logprob_error, worst_token = _logprob_error(ranks, reference)
    findings = [
        *_rank_findings(ranks),
        *_logprob_findings(logprob_error, worst_token, reference, tolerance),
    ]
    for step in range(len(reference.losses)):
        found = _step_findings(step, ranks, reference, tolerance, noise)
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
        gradient_error=_largest_share(ranks, "gradient_errors", reference.gradient_norms),
        weight_error=_largest_share(ranks, "weight_errors", reference.weight_norms),
        checksum=first.checksum,
        step_s=max(rank.step_s for rank in ranks),
        peak_memory_gb=max(rank.peak_memory_gb for rank in ranks),
    )


def largest_noise(reference: Measurement, noises: Sequence[Measurement]) -> Measurement:
    """Return of several runs with rounding errors how far each number was from the reference's at most.

    One run shows by chance what rounding can do: a layout of the demo's trained model was 29 times as far from the
    reference as one run was, and 5 times as far as the farthest of three.
    """

    def errors(kind: str) -> list[dict[str, float]]:
        steps = zip(*(getattr(noise, kind) for noise in noises), strict=True)
        return [{name: max(errors[name] for errors in step) for name in step[0]} for step in steps]

    def farthest(kind: str) -> list[float]:
        steps = zip(*(getattr(noise, kind) for noise in noises), strict=True)
        return [
            max(values, key=lambda value: abs(value - expected))
            for values, expected in zip(steps, getattr(reference, kind), strict=True)
        ]

    return replace(
        noises[0],
        losses=farthest("losses"),
        grad_norms=farthest("grad_norms"),
        gradient_errors=errors("gradient_errors"),
        weight_errors=errors("weight_errors"),
    )


def blurred_parameters(reference: Measurement, noise: Measurement) -> list[str]:
    """Return the parameters whose first gradient rounding changes so much that an error of 0.1 % would not show."""
    norms, errors = reference.gradient_norms[0], noise.gradient_errors[0]
    found = [name for name, norm in norms.items() if norm and not _GRADIENT_NOISE * errors[name] <= SENSITIVITY * norm]
    return sorted(found, key=model_order)


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


def _step_findings(
    step: int, ranks: Sequence[Measurement], theirs: Measurement, tolerance: float, noise: Measurement | None
) -> list[str]:
    mine = ranks[0]
    findings = []
    for name, kind, floor in (("loss", "losses", _LOSS_FLOOR), ("gradient norm", "grad_norms", 0.0)):
        value, expected = getattr(mine, kind)[step], getattr(theirs, kind)[step]
        scale = max(abs(expected), floor)
        moved = abs(getattr(noise, kind)[step] - expected) if noise is not None else 0.0
        if not abs(value - expected) <= max(tolerance * scale, _GRADIENT_NOISE * moved):  # not: nan departs
            findings.append(f"{name} {value:.7g} instead of {expected:.7g} ({_relative(value, expected, scale)})")
    updates = len(theirs.gradient_norms) // len(theirs.losses)
    gradients: list[str] = []
    for update in range(updates * step, updates * (step + 1)):
        allowed = _allowed_gradients(update, theirs, tolerance, noise)
        errors = [rank.gradient_errors[update] for rank in ranks]
        gradients = gradients or _parameter_findings("the gradient of ", errors, theirs.gradient_norms[update], allowed)
    allowed = _allowed_weights(step, theirs, tolerance, noise)
    errors = [rank.weight_errors[step] for rank in ranks]
    weights = _parameter_findings("", errors, theirs.weight_norms[step], allowed)
    if findings and not gradients + weights:
        shares = {name: _share(errors[0][name], norm) for name, norm in theirs.weight_norms[step].items()}
        largest = max(shares, key=lambda name: shares[name])
        findings.append(f"no parameter departs; the largest difference is {shares[largest]:.2e} in {largest}")
    findings += gradients + weights
    return [f"step {step + 1}: {', '.join(findings)}"] if findings else []


def _allowed_gradients(
    update: int, theirs: Measurement, tolerance: float, noise: Measurement | None
) -> dict[str, float]:
    """How far each gradient may be from the reference's."""
    norms = theirs.gradient_norms[update]
    dust = _DUST * math.sqrt(sum(norm**2 for norm in norms.values()))
    noises = noise.gradient_errors[update] if noise is not None else {}
    return {name: max(tolerance * norm, dust, _GRADIENT_NOISE * noises.get(name, 0.0)) for name, norm in norms.items()}


def _allowed_weights(step: int, theirs: Measurement, tolerance: float, noise: Measurement | None) -> dict[str, float]:
    """How far each weight may be from the reference's: by a part of its way, its noise, or a rounding error a step."""
    norms, noises = theirs.weight_norms[step], noise.weight_errors[step] if noise is not None else {}
    bounds = {
        name: max(tolerance * way, _WEIGHT_NOISE * noises.get(name, 0.0), (step + 1) * _EPS * norms[name])
        for name, way in theirs.movements[step].items()
    }
    return {name: min(bound, tolerance * norms[name]) for name, bound in bounds.items()}


def _parameter_findings(
    what: str, ranks: Sequence[Mapping[str, float]], norms: Mapping[str, float], allowed: Mapping[str, float]
) -> list[str]:
    """The first parameter in model order that is too far from the reference on any rank, and how many there are."""
    names = dict.fromkeys([*norms, *(name for errors in ranks for name in errors)])
    found: dict[str, tuple[float, int]] = {}
    for name in names:
        errors = [errors.get(name, math.inf) for errors in ranks]
        beyond = [
            index for index, error in enumerate(errors) if not error <= allowed.get(name, -1.0)
        ]  # not: nan departs
        if beyond:
            found[name] = errors[beyond[0]], beyond[0]
    if not found:
        return []
    first = min(found, key=model_order)
    error, rank = found[first]
    where = f" on rank {rank}" if rank else ""
    norm = norms.get(first, 0.0)
    by = f"{_share(error, norm):.2e}"
    bound = f" (rounding explains {_share(allowed[first], norm):.0e})" if what and first in allowed else ""
    others = f", first in model order of {len(found)} of {len(names)} parameters" if len(found) > 1 else ""
    return [f"{what}{first} departs by {by}{bound}{where}{others}"]


def _share(error: float, norm: float) -> float:
    """An error relative to a norm."""
    return 0.0 if error == 0 else error / norm if norm else math.inf


def _largest_share(ranks: Sequence[Measurement], kind: str, norms: Sequence[Mapping[str, float]]) -> float:
    """The largest relative error of any parameter on any rank, after the last step."""
    shares = [
        _share(error, norms[-1].get(name, 0.0)) for rank in ranks for name, error in getattr(rank, kind)[-1].items()
    ]
    return _largest(shares)


def _relative(value: float, expected: float, scale: float) -> str:
    return f"{abs(value - expected) / scale:.2e} relative"


def _largest(values: Iterable[float]) -> float:
    listed = list(values)
    return math.nan if any(math.isnan(value) for value in listed) else max(listed)
