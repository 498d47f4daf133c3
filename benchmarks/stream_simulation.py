"""What streaming would give if nothing but sampling and training took time: `StreamPlan` on a simulated engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, pairwise

import numpy as np
from response_lengths import LongTail

from lightning_megatron_rl.rollout.stream import StreamPlan
from lightning_megatron_rl.sample import Prompt

_NOTHING = 1e-6  # tokens that are left of a response which has ended, by rounding


@dataclass(frozen=True)
class Rates:
    """How fast an engine and a trainer are.

    Args:
        sequences: Numbers of sequences that were sampled at a time, in ascending order.
        token_s: Seconds in which each of so many sequences gets a token, with nothing in the cache.
        context_token_s: Seconds that such a step takes longer for each token that it has in the cache.
        prefill_tokens_per_s: At which the cache of tokens is computed that were drawn before an update.
        train_s: Of a step, everything but the rollout; of a part of the batch, its share.
    """

    sequences: list[int]
    token_s: list[float]
    prefill_tokens_per_s: float
    train_s: float
    context_token_s: float = 0.0

    def seconds_of_token(self, sequences: int, context: float) -> float:
        """Return the seconds in which each of so many sequences, with so many tokens in all, gets a token."""
        return float(np.interp(sequences, self.sequences, self.token_s)) + self.context_token_s * context


class _Sampler:
    """Samples what a plan begins, with a clock of its own."""

    def __init__(self, plan: StreamPlan, lengths: LongTail, rates: Rates) -> None:
        self.clock = 0.0
        self._plan, self._lengths, self._rates = plan, lengths, rates
        self._left: dict[int, np.ndarray] = {}  # tokens of each response under way, by its group's number
        self._drawn: dict[int, np.ndarray] = {}
        self._prompts: dict[int, int] = {}  # tokens of each one

    def advance(self, version: int, until: float = float("inf")) -> None:
        """Sample until a response ends, at most until a time."""
        for group in self._plan.begin(version):
            tokens = [self._lengths(group.prompt.token_ids, place) for place in range(len(group.responses))]
            self._left[group.number] = np.array(tokens, dtype=float)
            self._drawn[group.number] = np.zeros(len(tokens))
            self._prompts[group.number] = len(group.prompt.token_ids)
        alive = np.concatenate([left[left > 0] for left in self._left.values()]) if self._left else np.zeros(0)
        if not alive.size:
            assert until < float("inf"), f"nothing is under way: {self._plan.describe()}"
            self.clock = until
            return
        token_s = self._rates.seconds_of_token(alive.size, self._context())
        tokens = min(float(alive.min()), (until - self.clock) / token_s)
        self.clock += tokens * token_s
        for number, left in list(self._left.items()):
            self._drawn[number][left > 0] += tokens
            left -= tokens
            left[left < _NOTHING] = 0.0
            group = self._plan.under_way[number]
            for response in compress(group.responses, left == 0):
                response.finish_reason = "length"
            if group.is_complete:
                del self._left[number], self._drawn[number], self._prompts[number]
                self._plan.finish(group)

    def advance_to(self, until: float, version: int) -> None:
        """Sample until a time."""
        while self.clock < until - _NOTHING * self._rates.token_s[0]:
            self.advance(version, until=until)

    def recompute(self) -> None:
        """Compute the cache of everything under way anew."""
        self.clock += self._context() / self._rates.prefill_tokens_per_s

    def _context(self) -> float:
        """Return the tokens of the sequences that are sampled, prompts and all."""
        drawn = {number: drawn[self._left[number] > 0] for number, drawn in self._drawn.items()}
        return float(sum(some.sum() + some.size * self._prompts[number] for number, some in drawn.items()))


def simulate(
    plans: Sequence[StreamPlan], prompts: list[Prompt], lengths: LongTail, rates: Rates, *, separate: bool
) -> list[float]:
    """Return the seconds of each step of an epoch.

    Args:
        plans: One for each replica, alike and with nothing yet; with a `max_staleness` of 0 of the synchronous run.
        prompts: Of the epoch, in their order; replicas take turns.
        lengths: Of responses.
        rates: Of an engine, of which each replica has one, and of the trainer.
        separate: The samplers work while the trainer does.
    """
    samplers, ends = [_Sampler(plan, lengths, rates) for plan in plans], [0.0]
    batch_size, parts = plans[0].batch_size * len(plans), plans[0].batch_size // plans[0].part_size

    def admit(more: list[Prompt]) -> None:
        for place, plan in enumerate(plans):
            plan.admit(more[place :: len(plans)])

    ahead = (plans[0].max_staleness + 1) * batch_size
    admit(prompts[:ahead])
    for version in range(len(prompts) // batch_size):
        if version:
            start = ahead + (version - 1) * batch_size
            admit(prompts[start : start + batch_size])
            for sampler in samplers:
                sampler.recompute()
        for _ in range(parts):
            for plan, sampler in zip(plans, samplers, strict=True):
                while not plan.can_take(version):
                    sampler.advance(version)
            together = max(sampler.clock for sampler in samplers)
            trained = together + rates.train_s / parts
            for plan, sampler in zip(plans, samplers, strict=True):
                sampler.advance_to(together, version)
                plan.take(version)
                if separate:
                    sampler.advance_to(trained, version)
                sampler.clock = trained
        ends.append(samplers[0].clock)
    return [later - earlier for earlier, later in pairwise(ends)]
