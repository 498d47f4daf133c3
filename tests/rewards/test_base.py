import functools
import math
from fractions import Fraction

import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_megatron_rl.rewards import ExactMatch, FormatReward, Reward, compute_rewards, math_equal, reward_name
from lightning_megatron_rl.rewards.base import describe_sample, reward_names
from lightning_megatron_rl.sample import Sample
from tests.rewards.samples import HTTPJudgeV2, length, make_sample, two_arguments


class Named(HTTPJudgeV2):
    name = "judge"


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (length, "length"),
        (math_equal, "math_equal"),
        (functools.partial(two_arguments, scale=2.0), "two_arguments"),
        (HTTPJudgeV2(), "http_judge_v2"),
        (Named(), "judge"),
        (ExactMatch(), "exact_match"),
        (FormatReward("x", name="thinks"), "thinks"),
    ],
)
def test_reward_name(reward: Reward, name: str):
    assert reward_name(reward) == name


def test_weighted_sum_and_components():
    samples = [make_sample("a"), make_sample("bcd")]
    compute_rewards(samples, [length, HTTPJudgeV2(2.0)], weights=[0.5, 10.0])
    assert [sample.rewards for sample in samples] == [
        {"length": 1.0, "http_judge_v2": 2.0},
        {"length": 3.0, "http_judge_v2": 2.0},
    ]
    assert [sample.reward for sample in samples] == [20.5, 21.5]
    compute_rewards(samples, [length])
    assert [(sample.rewards, sample.reward) for sample in samples] == [({"length": 1.0}, 1.0), ({"length": 3.0}, 3.0)]


def test_each_reward_is_called_once_with_the_whole_batch():
    batches = []

    def record(samples: list[Sample]) -> list[float]:
        batches.append(list(samples))
        return [0.0] * len(samples)

    samples = [make_sample("a"), make_sample("b")]
    compute_rewards(samples, [record])
    assert batches == [samples]
    compute_rewards([], [record])
    assert len(batches) == 1


def test_numbers_that_are_no_floats():
    samples = [make_sample("a") for _ in range(4)]
    compute_rewards(samples, [functools.partial(constant, scores=(True, 2, Fraction(1, 2), 0.25))])
    assert [sample.reward for sample in samples] == [1.0, 2.0, 0.5, 0.25]
    assert all(type(sample.rewards["constant"]) is float for sample in samples)


def constant(samples: list[Sample], scores) -> list[float]:
    return scores


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        ([], None, "there are no rewards: name at least one"),
        ([length, HTTPJudgeV2()], [1.0], r"1 reward weights for 2 rewards \['length', 'http_judge_v2'\]"),
        ([length], [], "0 reward weights for 1 rewards"),
        ([length, HTTPJudgeV2(), length], None, "2 of the rewards .* are called 'length': rename"),
        ([FormatReward("a", name="mean")], None, "called 'mean', but reward/mean is a metric"),
        ([length], [math.nan], "the weight of the reward 'length' is nan"),
    ],
)
def test_bad_rewards_and_weights_are_refused(rewards: list[Reward], weights: list[float] | None, message: str):
    with pytest.raises(ValueError, match=message):
        reward_names(rewards, weights)
    with pytest.raises(ValueError, match=message):
        compute_rewards([make_sample("a")], rewards, weights)


SECOND = r"the sample of prompt 7 of 'train' \(prompt '2\+2=', response 'bad'\)"


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([1.0], r"'constant' returned 1 numbers for 2 samples.*prompt 3 of 'train'.*one number per sample"),
        ([1.0, 2.0, 3.0], "returned 3 numbers for 2 samples"),
        ([1.0, math.nan], f"'constant' returned nan for {SECOND}: return a finite number"),
        ([1.0, math.inf], f"returned inf for {SECOND}"),
        ([1.0, None], f"returned None, a NoneType, for {SECOND}: return a number"),
        ([1.0, "1"], f"returned '1', a str, for {SECOND}"),
        ([1.0, torch.tensor(1.0)], rf"returned tensor\(1.\), a Tensor, for {SECOND}.*\.item\(\)"),
        (torch.ones(2), r"returned a Tensor for 2 samples: return a list.*\.tolist\(\)"),
        (1.0, "returned a float for 2 samples"),
        (None, "returned a NoneType for 2 samples"),
    ],
)
def test_bad_results_are_refused_and_nothing_is_filled(scores, message: str):
    samples = [make_sample("ok", index=3), make_sample("bad", index=7, prompt="2+2=")]
    with pytest.raises(ValueError, match=message):
        compute_rewards(samples, [length, functools.partial(constant, scores=scores)])
    assert [(sample.rewards, sample.reward) for sample in samples] == [({}, 0.0), ({}, 0.0)]


def raises_on_bad(samples: list[Sample]) -> list[float]:
    return [{"ok": 1.0}[sample.response] for sample in samples]


def raises_on_pairs(samples: list[Sample]) -> list[float]:
    if len(samples) > 1:
        raise OSError("too many")
    return [1.0]


def test_reward_that_raises_is_named_with_its_sample():
    samples = [make_sample("ok", index=3), make_sample("bad", index=7, prompt="2+2="), make_sample("ok")]
    with pytest.raises(RuntimeError, match=f"'raises_on_bad' raised KeyError: 'bad' on {SECOND}") as caught:
        compute_rewards(samples, [length, raises_on_bad])
    assert isinstance(caught.value.__cause__, KeyError)
    assert samples[0].rewards == {}


def test_reward_that_raises_on_no_sample_alone():
    samples = [make_sample("a", index=3), make_sample("b")]
    with pytest.raises(RuntimeError, match="raised OSError: too many on a batch of 2 samples, though on none of them"):
        compute_rewards(samples, [raises_on_pairs])


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
