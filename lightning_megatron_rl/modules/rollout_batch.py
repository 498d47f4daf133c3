"""A rollout as training data: samples with their token sequences, fields, weights and metrics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_megatron_rl.algorithms.advantages import GROUP_RELATIVE, zero_spread
from lightning_megatron_rl.algorithms.metrics import add_mismatch_metrics
from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.modules.grpo_loss import TOP_ENTROPY_FIELD, GRPOLoss
from lightning_megatron_rl.modules.reward_metrics import add_reward_metrics
from lightning_megatron_rl.modules.steps import WEIGHT_FIELD
from lightning_megatron_rl.rewards.base import Reward, reward_names
from lightning_megatron_rl.rollout.protocol import SamplingParams
from lightning_megatron_rl.sample import Sample
from lightning_megatron_rl.utilities.ranges import COUNT, check_ranges

_ENTROPY_FIELD = "old_entropies"
_NGRAM = 4  # tokens; the length at which a repetition is counted as one


@dataclass
class Rollout:
    """The samples of one step and their token sequences; the responses to one prompt stand together."""

    samples: list[Sample]
    sequences: list[TokenSequence]  # one per sample
    num_generations: int  # responses per prompt

    def split(self, parts: int) -> list["Rollout"]:
        """Return `parts` rollouts of equally many whole groups, in order.

        Raises:
            ValueError: The prompts do not divide, with the arithmetic.
        """
        prompts = len(self.samples) // self.num_generations
        check_split(prompts, parts)
        size = prompts // parts * self.num_generations
        return [
            Rollout(self.samples[start : start + size], self.sequences[start : start + size], self.num_generations)
            for start in range(0, len(self.samples), size)
        ]

    @property
    def num_targets(self) -> int:
        """Tokens that the loss sums over."""
        return sum(int(sequence.loss_mask.sum()) for sequence in self.sequences)

    def set_field(self, name: str, values: Sequence[Tensor]) -> None:
        """Give each sequence a field, ``[tokens]``."""
        for sequence, value in zip(self.sequences, values, strict=True):
            sequence.fields[name] = value

    def set_routing(self, routing: Sequence[Tensor]) -> None:
        """Give each sequence the experts of its tokens, to be replayed."""
        for sequence, chosen in zip(self.sequences, routing, strict=True):
            sequence.routing = chosen

    def set_correction_weights(self, loss: GRPOLoss) -> None:
        """Give each sequence its importance-correction weights, if the loss corrects and does not find them itself."""
        if loss.correction is None or not self.sequences or "old_logprobs" not in self.sequences[0].fields:
            return
        old, sampled = (
            pad_sequence([sequence.fields[name] for sequence in self.sequences], batch_first=True)
            for name in ("old_logprobs", "rollout_logprobs")
        )
        mask = pad_sequence([sequence.loss_mask for sequence in self.sequences], batch_first=True)
        rows = loss.correction_weights(old, sampled, mask)
        assert rows is not None
        kept = [row[: len(sequence)].clone() for row, sequence in zip(rows, self.sequences, strict=True)]
        self.set_field("correction_weights", kept)  # a view sent to another replica would take all rows along

    def set_entropies(self, entropies: Sequence[Tensor]) -> None:
        """Give each token its entropy under the old policy, for `set_top_entropy`."""
        self.set_field(_ENTROPY_FIELD, entropies)

    def set_top_entropy(self, loss: GRPOLoss, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """Say which tokens are among those with the largest entropy of the update; a collective, in place of entropies.

        Does nothing if the loss takes all tokens.
        """
        if loss.config.top_entropy_quantile == 1:
            return
        entropies = [sequence.fields.pop(_ENTROPY_FIELD) for sequence in self.sequences]
        kept = loss.top_entropy_masks(entropies, [sequence.loss_mask for sequence in self.sequences], all_reduce)
        # clones: a view that is sent to another replica would take all sequences along
        self.set_field(TOP_ENTROPY_FIELD, [mask.float() for mask in kept])

    def set_advantages(self, advantages: Tensor) -> None:
        """Give each sample and each token of its sequence the sample's advantage, from `[samples]`."""
        for sample, sequence, advantage in zip(self.samples, self.sequences, advantages.tolist(), strict=True):
            sample.advantage = advantage
            sequence.fields["advantages"] = torch.full((len(sequence),), advantage)

    def set_token_advantages(self, advantages: Sequence[Tensor]) -> None:
        """Give each token its advantage, from ``[tokens]`` per sample, and each sample the mean of those that count."""
        self.set_field("advantages", advantages)
        for sample, sequence, advantage in zip(self.samples, self.sequences, advantages, strict=True):
            counted = advantage[sequence.loss_mask]
            sample.advantage = counted.mean().item() if len(counted) else 0.0

    def filter_overlong(self) -> None:
        """Leave the tokens of responses that the limit cut out of the loss and of its count of tokens."""
        for sample, sequence in zip(self.samples, self.sequences, strict=True):
            if sample.is_truncated:
                sequence.loss_mask = torch.zeros_like(sequence.loss_mask)

    def set_token_weights(
        self, loss: GRPOLoss, max_response_length: int, all_reduce: Callable[[Tensor], Tensor]
    ) -> None:
        """Give each token its weight in the aggregation, with global denominators."""
        lengths = torch.tensor([int(sequence.loss_mask.sum()) for sequence in self.sequences])
        weights = loss.token_weights(
            lengths,
            torch.arange(len(self.samples)) // self.num_generations,
            max_response_length=max_response_length,
            all_reduce=all_reduce,
        )
        for sequence, weight in zip(self.sequences, weights.float().tolist(), strict=True):
            sequence.fields[WEIGHT_FIELD] = torch.full((len(sequence.token_ids),), weight)

    def scale_token_weights(self, factor: float) -> None:
        """Multiply the weight of each token."""
        for sequence in self.sequences:
            sequence.fields[WEIGHT_FIELD] = sequence.fields[WEIGHT_FIELD] * factor


def join_rollouts(rollouts: Sequence[Rollout]) -> Rollout:
    """Return one rollout of the groups of several, in their order."""
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]
    return Rollout(samples, sequences, rollouts[0].num_generations)


def to_sequence(sample: Sample) -> TokenSequence:
    """Return prompt and response as one sequence with the sampler's log-probs and the advantage as fields.

    The loss mask covers the tokens that the policy wrote: neither the prompt nor an environment's replies.
    """
    # numpy reads a list of numbers several times as fast as torch
    num_prompt = len(sample.prompt.token_ids)
    token_ids = np.array(sample.prompt.token_ids + sample.response_ids, dtype=np.int64)
    mask = np.zeros(len(token_ids), dtype=np.bool_)
    mask[num_prompt:] = sample.response_mask if sample.turns else True
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    logprobs[num_prompt:] = sample.response_logprobs
    advantages = torch.full((len(token_ids),), sample.advantage)
    return TokenSequence(
        token_ids=torch.from_numpy(token_ids),
        loss_mask=torch.from_numpy(mask),
        fields={"rollout_logprobs": torch.from_numpy(logprobs), "advantages": advantages},
        origin=f"{sample.prompt.dataset} prompt {sample.prompt.index}",
    )


def turn_rewards(sample: Sample) -> dict[int, float]:
    """Return what an episode's turns were given, by the place of each turn's last token in the sequence.

    Example:
        A turn of tokens 0 to 2 of the response that was worth 0.1, after a prompt of 3 tokens: ``{4: 0.1}``.
    """
    if sample.outcome is None or sample.outcome.error:  # the default takes the place of all that the turns were worth
        return {}
    start = len(sample.prompt.token_ids)
    return {start + turn.stop - 1: turn.reward for turn in sample.turns if turn.stop > turn.start}


def add_sample_metrics(tally: Tally, samples: list[Sample], num_generations: int) -> None:
    """Add `reward/*` and `rollout/*`, see docs/metrics.md."""
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    groups = rewards.view(-1, num_generations)
    tally.add_mean_std("reward/mean", "reward/std", rewards)
    tally.add_min("reward/min", rewards)
    tally.add_max("reward/max", rewards)
    add_reward_metrics(tally, samples)
    tally.add_mean("reward/zero_spread_frac", zero_spread(groups).double())
    tally.add_mean("reward/pass_at_k", (groups > 0).any(dim=1).double())
    written = [sample.policy_ids for sample in samples]
    lengths = torch.tensor([len(token_ids) for token_ids in written], dtype=torch.float64)
    tally.add_mean("rollout/response_len_mean", lengths)
    tally.add_max("rollout/response_len_max", lengths)
    tally.add_mean("rollout/truncated_frac", [float(sample.is_truncated) for sample in samples])
    tally.add_mean("rollout/repetition_frac", [repetition(token_ids) for token_ids in written])
    tally.add_min("rollout/weight_version", [float(sample.weight_version) for sample in samples])
    if samples[0].outcome is not None:
        add_episode_metrics(tally, samples)


def add_staleness_metrics(tally: Tally, samples: list[Sample], version: int) -> None:
    """Add how much older than `version` the weights were that drew the tokens, see docs/metrics.md."""
    spans = [policy_segments(sample) for sample in samples]
    ages = torch.tensor([float(version - drawn_by) for span in spans for drawn_by, _ in span], dtype=torch.float64)
    tokens = torch.tensor([count for span in spans for _, count in span])
    tally.add_mean("rollout/staleness_mean", ages.repeat_interleave(tokens))
    tally.add_max("rollout/staleness_max", ages)
    tally.add_mean("rollout/partial_frac", [float(len(span) > 1) for span in spans])


def policy_segments(sample: Sample) -> list[tuple[int, int]]:
    """Return the segments of a sample without the tokens of an environment, which nobody drew."""
    if not sample.segments:
        return [(sample.weight_version, len(sample.policy_ids))]
    if not sample.turns:
        return sample.segments
    own, counted, start = sample.response_mask, list[tuple[int, int]](), 0
    for version, count in sample.segments:
        counted.append((version, sum(own[start : start + count])))
        start += count
    return counted


def add_episode_metrics(tally: Tally, samples: list[Sample]) -> None:
    """Add `episode/*`, see docs/metrics.md."""
    turns = [float(len(sample.turns)) for sample in samples]
    outcomes = [sample.outcome for sample in samples if sample.outcome is not None]
    tally.add_mean("episode/turns_mean", turns)
    tally.add_max("episode/turns_max", turns)
    tally.add_mean("episode/success_frac", [float(o.success) for o in outcomes if o.success is not None])
    tally.add_mean("episode/max_turns_frac", [float(outcome.reason == "max_turns") for outcome in outcomes])
    replies = [float(len(sample.response_ids) - sum(sample.response_mask)) for sample in samples]
    tally.add_mean("episode/reply_tokens_mean", replies)


def add_sequence_metrics(tally: Tally, sequences: Sequence[TokenSequence]) -> None:
    """Add `mismatch/*`, see docs/metrics.md, unless the update is to find the old policy's log-probs and adds them."""
    if not sequences or "old_logprobs" not in sequences[0].fields:
        return

    def joined(name: str) -> Tensor:
        return torch.cat([sequence.fields[name] for sequence in sequences])

    mask = torch.cat([sequence.loss_mask for sequence in sequences])
    weights = joined("correction_weights") if "correction_weights" in sequences[0].fields else None
    add_mismatch_metrics(tally, joined("old_logprobs"), joined("rollout_logprobs"), mask, weights)


def repetition(token_ids: list[int]) -> float:
    """Return the share of 4-grams of a response that occurred in it before.

    Example:
        ``repetition([1, 2, 3, 4, 1, 2, 3, 4]) == 0.2``: 1 of 5.
    """
    num_ngrams = len(token_ids) - _NGRAM + 1
    if num_ngrams < 1:
        return 0.0
    return 1 - len(set(zip(*(token_ids[start:] for start in range(_NGRAM)), strict=False))) / num_ngrams


def check_split(prompts: int, updates_per_rollout: int) -> None:
    """Refuse prompts of one replica that do not divide by the updates, with the arithmetic.

    Raises:
        ValueError: They do not.
    """
    if prompts % updates_per_rollout:
        raise ValueError(
            f"updates_per_rollout={updates_per_rollout} does not divide the {prompts} prompts of one replica"
            f" (batch_size / data-parallel size): {prompts} / {updates_per_rollout} ="
            f" {prompts / updates_per_rollout:.2f}. Change batch_size or updates_per_rollout."
        )


def check_batch_arithmetic(
    num_generations: int,
    updates_per_rollout: int,
    rewards: list[Reward],
    reward_weights: list[float] | None,
    sampling: SamplingParams,
    *,
    advantage: object = "grpo",
    compares_responses: bool = False,
    has_environment: bool = False,
) -> None:
    """Refuse settings that no rollout could be trained with.

    `compares_responses` says that dynamic sampling is on, `has_environment` that rewards also come from elsewhere.

    Raises:
        ValueError: With the value, why, and the remedy.
    """
    check_ranges({"num_generations": COUNT, "updates_per_rollout": COUNT}, locals())
    if num_generations < 2 and advantage in GROUP_RELATIVE:
        raise ValueError(
            f"num_generations={num_generations}: {advantage} compares the responses to one prompt with each other; with"
            " one response every advantage is 0. Set num_generations >= 2, or loss.advantage=reinforce_pp."
        )
    if num_generations < 2 and compares_responses:
        raise ValueError(
            f"dynamic_sampling with num_generations={num_generations}: one response has no spread, so every prompt"
            " would be drawn again. Set num_generations >= 2, or leave dynamic_sampling out."
        )
    if rewards or reward_weights or not has_environment:
        reward_names(rewards, reward_weights)
    check_training_sampling(sampling)


def check_training_sampling(sampling: SamplingParams) -> None:
    """Refuse to train on responses that do not differ, or that are drawn from what the trainer does not score.

    Raises:
        ValueError: With the value, why, and the remedy.
    """
    if sampling.temperature == 0:
        raise ValueError("sampling.temperature=0: greedy responses to one prompt are all equal. Use e.g. 1.0.")
    if sampling.top_p < 1 or sampling.top_k != -1:
        raise ValueError(
            f"sampling.top_p={sampling.top_p}, top_k={sampling.top_k}: the sampler would draw from a cut-off"
            " distribution and the trainer would score the full one, so every importance ratio would be wrong."
            " Train with top_p=1 and top_k=-1; validation_sampling may cut."
        )
