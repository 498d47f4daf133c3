import functools
import math

import pytest
from jsonargparse import ArgumentParser

from lightning_megatron_rl.rewards import ExactMatch, FormatReward, Reward, compute_rewards, math_equal, reward_name
from lightning_megatron_rl.rewards.base import describe_sample, reward_names
from tests.rewards.samples import HTTPJudgeV2, length, make_sample, two_arguments


class Named(HTTPJudgeV2):
    name = "judge"


def named_partial(name: str) -> Reward:
    reward = functools.partial(two_arguments, scale=2.0)
    reward.name = name
    return reward


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (length, "length"),
        (math_equal, "math_equal"),
        (functools.partial(two_arguments, scale=2.0), "two_arguments"),
        (named_partial("scaled"), "scaled"),
        (HTTPJudgeV2(), "http_judge_v2"),
        (Named(), "judge"),
        (ExactMatch(), "exact_match"),
        (FormatReward("x", name="thinks"), "thinks"),
    ],
)
def test_reward_name(reward: Reward, name: str):
    assert reward_name(reward) == name


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        ([], None, "there are no rewards: name at least one"),
        ([length, HTTPJudgeV2()], [1.0], r"1 reward weights for 2 rewards \['length', 'http_judge_v2'\]"),
        ([length], [], "0 reward weights for 1 rewards"),
        ([length, HTTPJudgeV2(), length], None, "2 of the rewards .* are called 'length': rename .*attribute `name`"),
        ([FormatReward("a", name="mean")], None, "called 'mean', but reward/mean is a metric"),
        ([FormatReward("a", name="overlong_penalty")], None, "reward/overlong_penalty is a metric"),
        ([FormatReward("a", name="kl_penalty")], None, "reward/kl_penalty is a metric"),
        ([FormatReward("a", name="length_failed_frac"), length], None, "counts the failures of 'length': rename"),
        ([FormatReward("a", name="truncated_frac")], None, "val/<set>/truncated_frac is another metric"),
        ([FormatReward("a", name="pass_at_8")], None, "val/<set>/pass_at_8 is another metric"),
        (length, None, "the rewards are 'length' alone: give a list"),
        ([HTTPJudgeV2], None, r"the reward HTTPJudgeV2 is a class: give an object of it, HTTPJudgeV2\(...\)"),
        (["math_equal"], None, r"the reward 'str' is a str without a method __call__\(samples\)"),
        ([length], 1.0, "reward_weights=1.0: give a list"),
        ([length], {"length": 1.0}, "reward_weights={'length': 1.0}: give a list"),
        ([length], [math.nan], "the weight of the reward 'length' is nan"),
    ],
)
def test_bad_rewards_and_weights_are_refused(rewards: list[Reward], weights: list[float] | None, message: str):
    with pytest.raises(ValueError, match=message):
        reward_names(rewards, weights)
    with pytest.raises(ValueError, match=message):
        compute_rewards([make_sample("a")], rewards, weights)


def test_long_texts_are_shortened():
    text = describe_sample(make_sample("start" + "x" * 5000 + "end", prompt="line\n" + "y" * 5000))
    assert len(text) < 350
    assert "'start" in text
    assert "end'" in text
    assert "\n" not in text


def parse(*lines: str):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--rewards", type=list[Reward])
    return parser.instantiate_classes(parser.parse_args([f"--rewards+={line}" for line in lines])).rewards


def test_config_takes_functions_and_classes():
    rewards = parse(
        "lightning_megatron_rl.rewards.math_equal",
        "tests.rewards.samples.length",  # whatever its parameter is called
        "lightning_megatron_rl.rewards.ExactMatch",
        "{class_path: lightning_megatron_rl.rewards.FormatReward, init_args: {pattern: '.*!', name: shouts}}",
    )
    assert rewards[:2] == [math_equal, length]
    assert [reward_name(reward) for reward in rewards[2:]] == ["exact_match", "shouts"]
    assert rewards[3]([make_sample("hi!")]) == [1.0]


@pytest.mark.parametrize(
    "reward",
    [
        "tests.rewards.samples.one_sample_only",
        "tests.rewards.samples.two_arguments",
        "tests.rewards.samples.make_sample",
        "lightning_megatron_rl.sample.Sample",
        "lightning_megatron_rl.rewards.no_such_reward",
        "{class_path: lightning_megatron_rl.rewards.FormatReward, init_args: {patern: x}}",
    ],
)
def test_config_rejects_other_signatures_and_typos(reward: str):
    with pytest.raises(Exception, match="rewards"):
        parse(reward)
