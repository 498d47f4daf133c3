"""What rewards become before they become advantages."""

import pytest
import torch

from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.grpo_loss import GRPOLoss
from lightning_megatron_rl.modules.rollout_batch import Rollout, to_sequence
from lightning_megatron_rl.modules.shaping import OverlongSettings, shaped_rewards
from lightning_megatron_rl.rewards import LengthPenalty
from lightning_megatron_rl.sample import Prompt, Sample, Turn


def rollout() -> Rollout:
    """Responses of 8, 9 and 10 tokens at a limit of 10; the last is cut. log π_old - log π_ref is 0.5 on each token."""
    prompt = Prompt(token_ids=[1, 2], text="ab")
    samples = [
        Sample(prompt, [3] * size, [-1.0] * size, finish_reason="length" if size == 10 else "stop", reward=reward)
        for size, reward in ((8, 1.0), (9, 2.0), (10, 3.0))
    ]
    sequences = [to_sequence(sample) for sample in samples]
    whole = Rollout(samples, sequences, num_generations=3)
    whole.set_field("old_logprobs", [torch.full((len(sequence),), -1.0) for sequence in sequences])
    whole.set_field("ref_logprobs", [torch.full((len(sequence),), -1.5) for sequence in sequences])
    return whole


def shaped(config: GRPOLossConfig, overlong: OverlongSettings | None) -> tuple[list[float], dict[str, float], Rollout]:
    whole, tally = rollout(), Tally()
    rewards = shaped_rewards(whole, config, overlong, max_response_length=10, tally=tally)
    return rewards.tolist(), tally.compute(), whole


def test_nothing_is_shaped_unless_asked():
    assert shaped(GRPOLossConfig(), None)[:2] == ([1.0, 2.0, 3.0], {})
    assert shaped(GRPOLossConfig(kl_coef=0.1), OverlongSettings(penalty=0.0))[:2] == ([1.0, 2.0, 3.0], {})


def test_overlong_penalty():
    rewards, metrics, whole = shaped(GRPOLossConfig(), OverlongSettings(penalty=1.0, buffer=0.2))
    assert rewards == pytest.approx([1.0, 1.5, 2.0], abs=1e-14)  # 0, half, all of the penalty
    assert metrics == {"reward/overlong_penalty": pytest.approx(-0.5, abs=1e-14)}
    assert [sample.reward for sample in whole.samples] == [1.0, 2.0, 3.0]  # as the reward functions said


def test_replies_of_an_environment_are_not_the_policys_length():
    prompt = Prompt(token_ids=[1], text="a")
    turns = [Turn(0, 5), Turn(20, 24)]
    samples = [Sample(prompt, [3] * 24, [-1.0] * 24, reward=1.0, turns=turns), Sample(prompt, [3] * 9, [-1.0] * 9)]
    whole = Rollout(samples, [to_sequence(sample) for sample in samples], num_generations=2)
    overlong = OverlongSettings(penalty=1.0, buffer=0.2)
    rewards = shaped_rewards(whole, GRPOLossConfig(), overlong, max_response_length=10, tally=Tally())
    assert rewards.tolist() == pytest.approx([0.5, -0.5])
    assert LengthPenalty(4, 10)(samples) == pytest.approx([-5 / 6, -5 / 6])


@pytest.mark.parametrize(("estimator", "per_token"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.10653065971263342)])
def test_kl_in_the_reward_is_summed_over_the_response(estimator: str, per_token: float):
    config = GRPOLossConfig(kl_coef=0.1, kl_in="reward", kl_estimator=estimator)
    rewards, metrics, _ = shaped(config, None)
    expected = [reward - 0.1 * per_token * size for reward, size in ((1, 8), (2, 9), (3, 10))]
    assert rewards == pytest.approx(expected, rel=1e-12)  # e^-0.5 + 0.5 - 1 in float64
    capped = {"reward/kl_capped_frac": 0.0} if estimator == "k3" else {}
    assert metrics == {"reward/kl_penalty": pytest.approx(-0.1 * per_token * 9, rel=1e-12), **capped}


def test_tokens_at_the_bound_of_k3_are_counted():
    """log π_ref - log π_old = 3 on two of 27 tokens: e^3 - 3 - 1 = 16 costs 10, and more would cost no more."""
    whole, tally = rollout(), Tally()
    whole.sequences[0].fields["ref_logprobs"][2:4] = 2.0
    config = GRPOLossConfig(kl_coef=0.1, kl_in="reward")
    rewards = shaped_rewards(whole, config, None, max_response_length=10, tally=tally)
    assert rewards[0].item() == pytest.approx(1 - 0.1 * (2 * 10 + 6 * 0.10653065971263342), rel=1e-12)  # float64
    assert tally.compute()["reward/kl_capped_frac"] == 2 / 27


def test_filtered_responses_are_in_no_numerator_and_no_denominator():
    """Fails if the weights count the tokens of the response instead of those that the loss sums over."""
    whole = rollout()
    whole.filter_overlong()
    assert [int(sequence.loss_mask.sum()) for sequence in whole.sequences] == [8, 9, 0]
    whole.set_token_weights(GRPOLoss(GRPOLossConfig()), max_response_length=10, all_reduce=lambda vector: vector)
    weights = [sequence.fields["weights"].unique().tolist() for sequence in whole.sequences]
    assert weights == [[1.0], [1.0], [0.0]]  # u = w N: the token mean over 17 tokens


@pytest.mark.parametrize("options", [{"penalty": -1.0}, {"buffer": 0.0}, {"buffer": 1.5}])
def test_bad_settings_are_refused(options: dict[str, float]):
    with pytest.raises(ValueError, match=r"penalty=-1\.0|buffer="):
        OverlongSettings(**options)
