"""What the trainer waited for in a step, and what its sampler did meanwhile."""

from lightning_megatron_rl.rollout.watch import AtBatch
from lightning_megatron_rl.utilities.spans import SAMPLING, SpanLog


def idle_shares(began: float, ended: float, waited: float, sampler: SpanLog | None) -> dict[str, float]:
    """Return the shares of a step in which the trainer and its sampler had nothing to do.

    Args:
        began: Of the step, in seconds of `time.monotonic`.
        ended: Of it.
        waited: Seconds of it in which the trainer waited for samples.
        sampler: What the sampler of this rank did; None: another rank leads it, and tells.
    """
    seconds = max(ended - began, 1e-9)
    shares = {"perf/trainer_idle_frac": min(waited / seconds, 1.0), "perf/sampler_idle_frac": 0.0}
    if sampler is not None:
        busy, _, known = _sampled(began, ended, sampler)
        shares["perf/sampler_idle_frac"] = max(1.0 - busy / known, 0.0)
    return shares


def sampling_rate(began: float, ended: float, sampler: SpanLog | None) -> dict[str, float]:
    """Return the tokens per second that the sampler of this rank drew in a step; arguments as of `idle_shares`."""
    if sampler is None:
        return {"perf/sampler_tokens_per_s": 0.0}
    _, tokens, known = _sampled(began, ended, sampler)
    return {"perf/sampler_tokens_per_s": tokens / known}


def stream_counts(at_batch: AtBatch) -> dict[str, float]:
    """Return what is summed over the streams of all replicas."""
    return {
        "rollout/ready": float(at_batch.ready),
        "rollout/under_way": float(at_batch.under_way),
        "rollout/dropped": float(at_batch.num_dropped),
    }


def _sampled(began: float, ended: float, sampler: SpanLog) -> tuple[float, float, float]:
    """Return busy seconds and tokens of a step, and the seconds of it that are known of.

    A sampler that works unasked tells what it did with its next answer, some 50 ms later: the share is that of the time
    until its last one.
    """
    until = ended if sampler.known_until is None else min(ended, sampler.known_until)
    if until <= began:
        until = ended
    busy, tokens = sampler.within(SAMPLING, began, until)
    return busy, tokens, max(until - began, 1e-9)
