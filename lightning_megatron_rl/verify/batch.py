"""The frozen batch: synthetic or a recorded rollout, the same for every layout."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.policy import PolicyModule
from lightning_megatron_rl.modules.rollout_batch import to_sequence
from lightning_megatron_rl.rollout.record import read_first_step
from lightning_megatron_rl.sample import Prompt, Sample

_MAX_PROMPT, _MAX_RESPONSE = 24, 24  # tokens of a synthetic sequence


@dataclass
class FrozenBatch:
    """One global batch.

    A module that samples gets the prompts of `samples` and an engine that replays the responses; any other gets
    `sequences`.
    """

    description: str
    sequences: list[TokenSequence]
    samples: list[Sample] | None = None  # one per sequence; the responses to one prompt stand together

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of the samples, in order."""
        return list({id(sample.prompt): sample.prompt for sample in self.samples or []}.values())

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(sequence) for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(sequence) for sequence in self.sequences)


def make_batch(module: PolicyModule, recorded: str | Path | None, *, processes: int, seed: int = 0) -> FrozenBatch:
    """Return the batch for `module`: the first step of a recorded rollout, or a synthetic one.

    Args:
        module: What will be trained on it.
        recorded: A file that `RolloutSamples` wrote; None for a synthetic batch.
        processes: Most model replicas; a synthetic batch has something for each.
        seed: Of the synthetic batch.

    Raises:
        ValueError: A malformed file, with the line; a batch that the module cannot be trained on.
    """
    if recorded is not None:
        return _recorded_batch(module, recorded)
    from lightning_megatron_rl.models.hf.model import HFModel

    config = HFModel(module.model_path).config
    tokens = torch.arange(config.vocab_size)  # padding, too: its gradient is a matter of the layout
    generator = torch.Generator().manual_seed(seed)
    budget = module.train_settings.token_budget
    max_prompt, max_response = min(_MAX_PROMPT, budget // 2), min(_MAX_RESPONSE, budget // 2)
    if isinstance(module, GRPOModule):
        max_response = min(max_response, module.sampling.max_tokens)
        num_prompts = processes * module.updates_per_rollout
        samples = synthetic_samples(
            synthetic_prompts(num_prompts, tokens, max_prompt, generator),
            module.num_generations,
            tokens,
            max_response,
            generator,
        )
        description = f"synthetic rollout, {num_prompts} prompts x {module.num_generations} generations, seed {seed}"
        batch = FrozenBatch(description, [to_sequence(sample) for sample in samples], samples)
    else:
        count = 2 * processes + 1  # not a multiple: the replicas bring unequal shares
        sequences = synthetic_sequences(count, tokens, max_prompt, max_response, generator)
        batch = FrozenBatch(f"synthetic, {count} sequences, seed {seed}", sequences)
    batch.description += f", {batch.num_tokens} tokens"
    return batch


def synthetic_prompts(count: int, tokens: Tensor, max_length: int, generator: torch.Generator) -> list[Prompt]:
    """Return prompts of 1 to `max_length` random `tokens`, no two of them equal."""
    prompts: dict[tuple[int, ...], Prompt] = {}
    while len(prompts) < count:
        ids = _random_tokens(_random_length(1, max_length, generator), tokens, generator)
        index = len(prompts)
        prompts.setdefault(tuple(ids), Prompt(token_ids=ids, text=f"synthetic prompt {index}", answer="", index=index))
    return list(prompts.values())


def synthetic_samples(
    prompts: Sequence[Prompt], num_generations: int, tokens: Tensor, max_length: int, generator: torch.Generator
) -> list[Sample]:
    """Return `num_generations` responses to each prompt with random rewards; the very first response is empty.

    The sampler's log-probs are near those of a uniform distribution, so that importance weights are cut and not cut.
    """
    samples: list[Sample] = []
    for prompt in prompts:
        for _ in range(num_generations):
            length = _random_length(1, max_length, generator) if samples else 0
            noise = torch.randn(length, generator=generator)
            logprobs = -(math.log(len(tokens)) + noise).abs()
            samples.append(
                Sample(
                    prompt=prompt,
                    response_ids=_random_tokens(length, tokens, generator),
                    response_logprobs=logprobs.tolist(),
                    finish_reason="length" if length == max_length else "stop",
                    reward=round(float(torch.rand((), generator=generator)), 3),
                )
            )
    return samples


def synthetic_sequences(
    count: int, tokens: Tensor, max_prompt: int, max_response: int, generator: torch.Generator
) -> list[TokenSequence]:
    """Return ragged sequences of a prompt and a response, which is trained on; the first has nothing to train on."""
    sequences = []
    for index in range(count):
        num_prompt = _random_length(1, max_prompt, generator)
        length = num_prompt + _random_length(1, max_response, generator)
        mask = torch.arange(length) >= (num_prompt if index else length)
        sequences.append(TokenSequence(torch.tensor(_random_tokens(length, tokens, generator)), mask))
    return sequences


def _recorded_batch(module: PolicyModule, path: str | Path) -> FrozenBatch:
    from lightning_megatron_rl.models.hf.model import HFModel

    groups: dict[tuple[int, ...], list[Sample]] = {}
    for sample in read_first_step(path):
        groups.setdefault(tuple(sample.prompt.token_ids), []).append(sample)
    vocab_size = HFModel(module.model_path).config.vocab_size
    samples: list[Sample] = []
    for group in groups.values():
        if isinstance(module, GRPOModule) and len(group) < module.num_generations:
            raise ValueError(
                f"{path}: {len(group)} responses to prompt {group[0].prompt.index}, the module compares"
                f" num_generations={module.num_generations}: record a whole step, or lower num_generations."
            )
        # a prompt that was drawn twice has several groups: one is enough, and one is what its token ids name
        group = group[: module.num_generations] if isinstance(module, GRPOModule) else group
        for sample in group:
            sample.prompt = group[0].prompt
        samples += group
    for sample in samples:
        largest = max(sample.prompt.token_ids + sample.response_ids)
        if largest >= vocab_size or min(sample.prompt.token_ids + sample.response_ids) < 0:
            raise ValueError(
                f"{path}: prompt {sample.prompt.index} has token {largest}, the vocabulary of {module.model_path} has"
                f" {vocab_size}: the rollout was recorded with another model."
            )
    batch = FrozenBatch(f"rollout recorded in {path}", [to_sequence(sample) for sample in samples], samples)
    budget = module.train_settings.token_budget
    if batch.longest > budget:
        raise ValueError(
            f"{path}: a sequence of {batch.longest} tokens > train.max_tokens_per_microbatch={budget}:"
            " raise train.max_tokens_per_microbatch."
        )
    batch.description += f", {len(groups)} prompts, {len(samples)} samples, {batch.num_tokens} tokens"
    return batch


def _random_length(least: int, most: int, generator: torch.Generator) -> int:
    return int(torch.randint(least, most + 1, (), generator=generator))


def _random_tokens(count: int, tokens: Tensor, generator: torch.Generator) -> list[int]:
    return tokens[torch.randint(len(tokens), (count,), generator=generator)].tolist()
