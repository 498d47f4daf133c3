"""What is computed for a whole rollout at once is what each of its sequences has by itself."""

import pytest
import torch

from lightning_megatron_rl.algorithms.metrics import add_mismatch_metrics
from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.grpo_loss import GRPOLoss
from lightning_megatron_rl.modules.rollout_batch import Rollout, add_sequence_metrics
from lightning_megatron_rl.sample import Prompt, Sample

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
