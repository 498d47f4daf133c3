"""Validation samples, per data set: rewards, pass@k and majority votes with intervals, over all replicas."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.tally import Formula, Tally
from lightning_megatron_rl.modules.estimators import majority_vote, mean_interval, pass_at_k, score_interval
from lightning_megatron_rl.rewards.limited_child import RequestError
from lightning_megatron_rl.rewards.text_rewards import text_child
from lightning_megatron_rl.rollout.protocol import SamplingParams
from lightning_megatron_rl.sample import Sample
from lightning_megatron_rl.utilities.notices import tell_loss
from lightning_megatron_rl.utilities.ranges import COUNT, COUNT_OR_NONE, FINITE, Range, check_ranges

_BOXED = "\\boxed{"
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?")  # of the list "1,2" each
_POINT = re.compile(r"(?<![\w.])\.(?=\d)")  # of ".5"
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")  # not the list "1,2"
_RANGES = {
    "num_generations": COUNT_OR_NONE.called("0 draws only the one response of validation_sampling"),
    "pass_at": COUNT,
    "right_above": FINITE,
    "confidence": Range(above=0, below=1, note="0.95 is usual"),
}


@dataclass(frozen=True)
class EvaluationSettings:
    r"""What validation draws and reports besides one response per prompt.

    Args:
        num_generations: Responses to each prompt that are sampled for pass@k and majority votes; 0 draws none.
        sampling: How they are sampled; as in training if not given.
        pass_at: The k of pass@k, at most `num_generations`; 1, 2, 4, ... up to it if empty.
        right_above: A response is right if its weighted reward is greater.
        answer_pattern: Regular expression with one group, whose last match in a response is its vote. If not given: the
            last \boxed{}, else the last number, else the whole response.
        confidence: Of the intervals.

    Raises:
        ValueError: Settings that contradict each other, with the remedy.
    """

    num_generations: int = 0
    sampling: SamplingParams | None = None
    pass_at: tuple[int, ...] = ()
    right_above: float = 0.0
    answer_pattern: str | None = None
    confidence: float = 0.95

    def __post_init__(self) -> None:
        check_ranges(_RANGES, vars(self), "evaluation.")
        if self.num_generations == 1:
            raise ValueError(
                f"evaluation.num_generations={self.num_generations}: give at least 2, or 0 for the one response of"
                " validation_sampling alone."
            )
        object.__setattr__(self, "pass_at", tuple(self.pass_at))
        for k in self.pass_at:
            if not 1 <= k <= self.num_generations:
                raise ValueError(
                    f"evaluation.pass_at={list(self.pass_at)}: pass@{k} is estimated from at least {k} samples, but"
                    f" num_generations={self.num_generations}. Raise num_generations or leave out {k}."
                )
        if self.num_generations and self.sampling is not None and self.sampling.temperature == 0:
            raise ValueError(
                f"evaluation.sampling.temperature=0: the {self.num_generations} greedy responses to a prompt would be"
                " equal. Use e.g. 1.0; the greedy response is that of validation_sampling."
            )
        if self.answer_pattern is not None:
            try:
                groups = re.compile(self.answer_pattern).groups
            except re.error as error:
                raise ValueError(f"evaluation.answer_pattern={self.answer_pattern!r}: {error}.") from error
            if groups != 1:
                raise ValueError(
                    f"evaluation.answer_pattern={self.answer_pattern!r} has {groups} groups: the one group is the vote."
                )

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k that are reported."""
        return self.pass_at or tuple(2**power for power in range(self.num_generations.bit_length()))

    def passes(self, one: SamplingParams, training: SamplingParams) -> list[tuple[SamplingParams, int]]:
        """Return how prompts are sampled, and with how many responses each.

        Args:
            one: For the one response per prompt.
            training: For the several, unless `sampling` says otherwise.

        Example:
            ``EvaluationSettings(num_generations=8).passes(greedy, training) == [(greedy, 1), (training, 8)]``
        """
        several = [(self.sampling or training, self.num_generations)] if self.num_generations else []
        return [(one, 1), *several]

    def check_length(self, max_model_len: int) -> None:
        """Refuse responses that the engine has no room for.

        Raises:
            ValueError: with the two lengths.

        Example:
            ``EvaluationSettings(num_generations=8, sampling=SamplingParams(max_tokens=99)).check_length(64)`` raises.
        """
        if self.sampling is not None and self.sampling.max_tokens >= max_model_len:
            raise ValueError(
                f"evaluation.sampling.max_tokens={self.sampling.max_tokens} leaves no room for a prompt in"
                f" engine.max_model_len={max_model_len}: raise max_model_len or lower max_tokens."
            )


class Evaluation:
    """Collects the samples of one validation epoch.

    Args:
        settings: What is reported.
        has_episodes: Whether samples come from an environment.

    Example:
        ``evaluation.add(samples); evaluation.finish("val", all_reduce, union)`` gives ``{"val/gsm8k/mean_at_1": 0.41,
        ...}``
    """

    def __init__(self, settings: EvaluationSettings = EvaluationSettings(), has_episodes: bool = False) -> None:
        self.settings = settings
        self.has_episodes = has_episodes
        self.samples: list[Sample] = []  # of this replica, until the next epoch begins
        self._tally = Tally()
        self._sets: set[str] = set()
        self._rewards: set[str] = set()
        self._finished = False

    def add(self, samples: list[Sample], num_generations: int = 1) -> None:
        """Take the samples of one batch; the `num_generations` responses to one prompt stand together."""
        if self._finished:
            self.samples, self._finished = [], False
        self.samples += samples
        groups = [samples[start : start + num_generations] for start in range(0, len(samples), num_generations)]
        for dataset in dict.fromkeys(group[0].prompt.dataset for group in groups):
            mine = [group for group in groups if group[0].prompt.dataset == dataset]
            self._sets.add(dataset)
            self._rewards |= mine[0][0].rewards.keys()
            self._add_set(dataset, mine, num_generations, sorted(mine[0][0].rewards))

    def _add_set(self, dataset: str, groups: list[list[Sample]], num_generations: int, rewards: list[str]) -> None:
        """Add groups of one set, none of them to make its metrics known."""
        n, settings = num_generations, self.settings
        self._add(f"{dataset}/mean_at_{n}", [_mean([s.reward for s in group]) for group in groups], bounded=False)
        if n == 1:
            samples = [group[0] for group in groups]
            for name in rewards:
                self._tally.add_mean(f"{dataset}/{name}", [sample.rewards[name] for sample in samples])
            self._tally.add_mean(f"{dataset}/truncated_frac", [float(sample.is_truncated) for sample in samples])
            self._tally.add_mean(f"{dataset}/failed_frac", [float(bool(sample.reward_errors)) for sample in samples])
            if self.has_episodes:
                self._add_episodes(dataset, samples)
            return
        right = [[sample.reward > settings.right_above for sample in group] for group in groups]
        for k in settings.ks:
            self._add(f"{dataset}/pass_at_{k}", [pass_at_k(n, sum(verdicts), k) for verdicts in right])
        votes = [[vote(sample.final_text, settings.answer_pattern) for sample in group] for group in groups]
        majorities = [majority_vote(answers, verdicts) for answers, verdicts in zip(votes, right, strict=True)]
        self._add(f"{dataset}/maj_at_{n}", majorities)

    def _add_episodes(self, dataset: str, samples: list[Sample]) -> None:
        known = [s.outcome.success for s in samples if s.outcome is not None and s.outcome.success is not None]
        self._tally.add_mean(f"{dataset}/success_frac", [float(success) for success in known])
        self._tally.add_mean(f"{dataset}/turns_mean", [float(len(sample.turns)) for sample in samples])

    def _add(self, name: str, values: list[float], bounded: bool = True) -> None:
        """Add one value per prompt to a mean and to both ends of its interval."""
        vector = torch.tensor(values, dtype=torch.float64)
        self._tally.add_mean(name, vector)
        sums = {"total": vector.sum(), "squares": vector.square().sum(), "count": torch.tensor(len(values))}
        for end in (0, 1):
            formula = _interval_end(end, bounded, self.settings.confidence)
            self._tally.add(f"{name}_{('low', 'high')[end]}", formula, sums)

    def names(self, stage: str, sets: Sequence[str], rewards: Sequence[str]) -> list[str]:
        """Return the names of the metrics that an epoch of these sets and rewards has."""
        empty = Evaluation(self.settings, self.has_episodes)
        empty._sets, empty._rewards = set(sets), set(rewards)
        return list(empty.finish(stage, lambda vector, op: vector, list))

    def finish(
        self,
        stage: str,
        all_reduce: Callable[[Tensor, Literal["sum", "max"]], Tensor],
        union: Callable[[Sequence[str]], list[str]],
    ) -> dict[str, float]:
        """Return the epoch's metrics of all replicas, by ``<stage>/<set>/<metric>``, and start anew.

        Args:
            stage: "val" or "test".
            all_reduce: Reduces a vector over the replicas.
            union: Returns the names of all ranks: a replica may have had no prompt of a small set.
        """
        sets, rewards = union(sorted(self._sets)), union(sorted(self._rewards))
        for dataset in sets:
            for count in (1, self.settings.num_generations) if self.settings.num_generations else (1,):
                self._add_set(dataset, [], count, rewards)
        metrics = self._tally.reduce(all_reduce).compute()
        self._tally, self._sets, self._rewards, self._finished = Tally(), set(), set(), True
        return {f"{stage}/{name}": value for name, value in metrics.items()}


def vote(response: str, pattern: str | None = None) -> str | None:
    r"""Return the answer that a response gives in a majority vote; None if the pattern finds none.

    A child process matches the pattern, and gives up after 5 s of CPU time: some patterns take for ever.

    Example:
        ``vote("so \\boxed{1,234}, not 7") == "1234"``; ``vote("It is 12.") == "12"``; ``vote(" Paris ") == "Paris"``.
    """
    if pattern is not None:
        try:
            found = text_child().ask(["last_group", pattern, response])
        except RequestError as error:
            about = f"evaluation.answer_pattern={pattern!r} on a response of {len(response)} characters"
            tell_loss(f"{about} {error}: no vote")
            return None
        return found.strip() if found is not None else None
    start = response.rfind(_BOXED)
    if start >= 0:
        depth = 1
        for position in range(start + len(_BOXED), len(response)):
            depth += {"{": 1, "}": -1}.get(response[position], 0)
            if depth == 0:
                boxed = response[start + len(_BOXED) : position].strip()
                return boxed.replace(",", "") if _THOUSANDS.fullmatch(boxed) else boxed
    numbers = _NUMBER.findall(_POINT.sub("0.", response))
    return numbers[-1].replace(",", "") if numbers else response.strip()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@cache  # a tally tells formulas apart by identity
def _interval_end(end: int, bounded: bool, confidence: float) -> Formula:
    interval = score_interval if bounded else mean_interval

    def formula(total: float, squares: float, count: float) -> float:
        return interval(total, squares, count, confidence)[end]

    return formula
