"""Arguments of modules that sample, given from Python: where YAML has a mapping, code gives an object."""

from pathlib import Path
from typing import Any

import pytest

from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.ppo import PPOModule
from lightning_megatron_rl.rewards.builtin import math_equal
from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine


def make(cls: type = GRPOModule, **options: Any) -> GRPOModule:
    return cls(**{"model": "nothing", "rewards": [math_equal], **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": Path("runs/model")}, r"model is to be str\(\.\.\.\), not a PosixPath"),
        ({"sampling": {"temperature": 1.0}}, r"sampling is to be SamplingParams\(\.\.\.\), not a dict"),
        ({"validation_sampling": {"temperature": 1.0}}, r"validation_sampling is to be SamplingParams"),
        ({"loss": {"kl_coef": 0.1}}, r"loss is to be GRPOLossConfig"),
        ({"loss": "gspo"}, r"loss is to be GRPOLossConfig\(\.\.\.\), not a str"),
        ({"episodes": {"max_turns": 2}}, r"episodes is to be EpisodeSettings"),
        ({"reference": {"model": "nothing"}}, r"reference is to be ReferenceSettings"),
        ({"overlong": {"penalty": 0.0}}, r"overlong is to be OverlongSettings"),
        ({"dynamic_sampling": {}}, r"dynamic_sampling is to be DynamicSampling"),
        ({"streaming": 2}, r"streaming is to be StreamingSettings"),
        ({"evaluation": {"num_generations": 4}}, r"evaluation is to be EvaluationSettings"),
        ({"engine": {"max_model_len": 64}}, r"engine=\{'max_model_len': 64\} is no rollout engine: give an object"),
        ({"engine": "VLLMEngine"}, r"engine='VLLMEngine' is no rollout engine"),
        ({"engine": VLLMEngine}, r"engine=<class '.*VLLMEngine'> is no rollout engine"),
    ],
    ids=str,
)
def test_what_is_of_another_class_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(TypeError, match=f"^GRPOModule: {message}"):
        make(**options)


def test_critic_is_no_dict():
    with pytest.raises(TypeError, match=r"^PPOModule: critic is to be CriticSettings\(\.\.\.\), not a dict\."):
        make(PPOModule, critic={"model": "nothing"})
