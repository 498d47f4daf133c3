"""What is computed for a whole rollout at once is what each of its sequences has by itself."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron_rl.algorithms.metrics import add_mismatch_metrics
from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.grpo_loss import GRPOLoss
from lightning_megatron_rl.modules.rollout_batch import Rollout, add_sequence_metrics, repetition, to_sequence
from lightning_megatron_rl.sample import Prompt, Sample, Turn
from tests.properties import PROPERTY, SEEDS

LENGTHS = (5, 9, 2, 7)


def make_rollout() -> Rollout:
    generator = torch.Generator().manual_seed(1)
    samples, sequences = [], []
    for length in LENGTHS:
        sampled, noise = -torch.rand(2, length, generator=generator) * 3
        fields = {"rollout_logprobs": sampled, "old_logprobs": sampled + noise / 2}
        sequences.append(TokenSequence(torch.arange(length), torch.arange(length) > 0, fields))
        samples.append(Sample(Prompt(text="", token_ids=[1]), [2] * (length - 1), [0.0] * (length - 1)))
    return Rollout(samples, sequences, num_generations=2)


@pytest.mark.parametrize("correction", ["tis", "icepop", "geo_mask"])
def test_correction_weights_are_those_of_each_sequence(correction):
    rollout = make_rollout()
    loss = GRPOLoss(GRPOLossConfig(correction=correction))
    rollout.set_correction_weights(loss)
    kinds = set()
    for sequence in rollout.sequences:
        fields = sequence.fields
        alone = loss.correction_weights(
            fields["old_logprobs"][None], fields["rollout_logprobs"][None], sequence.loss_mask[None]
        )
        assert alone is not None
        weights = fields["correction_weights"]
        assert torch.equal(weights, alone[0])
        kinds |= set(weights.tolist())
        # another replica gets a sequence's own memory, not that of the whole rollout with each of its sequences
        assert weights.untyped_storage().nbytes() == weights.numel() * weights.itemsize
    assert len(kinds) > 1 or correction == "geo_mask"


def test_without_correction_there_are_no_weights():
    rollout = make_rollout()
    rollout.set_correction_weights(GRPOLoss(GRPOLossConfig(correction=None)))
    assert all("correction_weights" not in sequence.fields for sequence in rollout.sequences)


def test_mismatch_of_a_rollout_is_that_of_its_sequences():
    rollout = make_rollout()
    rollout.set_correction_weights(GRPOLoss(GRPOLossConfig(correction="icepop")))
    whole, parts = Tally(), Tally()
    add_sequence_metrics(whole, rollout.sequences)
    for sequence in rollout.sequences:
        fields = sequence.fields
        add_mismatch_metrics(parts, fields["old_logprobs"], fields["rollout_logprobs"], sequence.loss_mask)
        parts.add_mean("mismatch/rejected_frac", fields["correction_weights"] == 0, sequence.loss_mask)
    assert whole.compute() == pytest.approx(parts.compute(), rel=1e-12)  # float64 sums in another order
    nothing = Tally()
    add_sequence_metrics(nothing, [])
    assert nothing.compute() == {}


def random_sample(seed: int, num_turns: int) -> Sample:
    """A response of up to 40 tokens with replies of an environment, if it has turns."""
    draw = random.Random(seed)
    prompt = [draw.randrange(2**40) for _ in range(draw.randint(1, 9))]
    response = [draw.randrange(2**40) for _ in range(draw.randint(0, 40))]
    logprobs = [draw.choice([0.0, -1e-45, -1e9, -float("inf"), -draw.expovariate(1.0)]) for _ in response]
    cuts = sorted(draw.randint(0, len(response)) for _ in range(2 * num_turns))
    turns = [Turn(start, stop) for start, stop in zip(cuts[::2], cuts[1::2], strict=True)]
    advantage = draw.gauss(0, 1)
    return Sample(Prompt(prompt, "", index=7), response, logprobs, turns=turns, advantage=advantage)


@PROPERTY
@given(seed=SEEDS, num_turns=st.integers(0, 4))
def test_sequence_is_prompt_and_response_token_by_token(seed: int, num_turns: int):
    sample = random_sample(seed, num_turns)
    sequence = to_sequence(sample)
    tokens = [(token, False, 0.0) for token in sample.prompt.token_ids]
    for place, (token, logprob) in enumerate(zip(sample.response_ids, sample.response_logprobs, strict=True)):
        own = not num_turns or any(turn.start <= place < turn.stop for turn in sample.turns)
        tokens.append((token, own, logprob))
    expected = {
        "token_ids": torch.tensor([token for token, _, _ in tokens]),
        "loss_mask": torch.tensor([own for _, own, _ in tokens]),
        "rollout_logprobs": torch.tensor([logprob for _, _, logprob in tokens]),
        "advantages": torch.tensor([sample.advantage] * len(tokens)),
    }
    found = {"token_ids": sequence.token_ids, "loss_mask": sequence.loss_mask, **sequence.fields}
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert values.dtype == expected[name].dtype
        assert torch.equal(values, expected[name]), name
        # a sequence goes to another replica with its own memory alone
        assert values.untyped_storage().nbytes() == values.numel() * values.itemsize
    written = [token for token, own, _ in tokens[len(sample.prompt.token_ids) :] if own]
    assert sample.policy_ids == written
    assert sample.policy_ids is not sample.response_ids  # what a caller does to the list does nothing to the sample


@PROPERTY
@given(token_ids=st.lists(st.sampled_from([0, -1, 2**40]), max_size=60))
def test_repetition_counts_the_4_grams_seen_before(token_ids: list[int]):
    seen, repeated = list[list[int]](), 0
    for start in range(len(token_ids) - 3):
        repeated += token_ids[start : start + 4] in seen
        seen.append(token_ids[start : start + 4])
    assert repetition(token_ids) == (1 - (len(seen) - repeated) / len(seen) if seen else 0.0)
