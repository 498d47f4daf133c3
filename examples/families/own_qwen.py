"""A model family of your own: Qwen2 under another name, as a fork of it would be.

With its converter in own_qwen_bridge.py this is all that the package has to know. It is read by every process of a run:

    export PYTHONPATH=examples/families LIGHTNING_MEGATRON_RL_FAMILIES=own_qwen

A script may call `add_family("own_qwen")` of `lightning_megatron_rl.models.families.registry` in its place.
"""

from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from lightning_megatron_rl.models.families.family import Family


class OwnQwenConfig(Qwen2Config):
    model_type = "own_qwen"


class OwnQwenForCausalLM(Qwen2ForCausalLM):
    config_class = OwnQwenConfig


AutoConfig.register("own_qwen", OwnQwenConfig)  # Transformers is the reference: it must know the family, too
AutoModelForCausalLM.register(OwnQwenConfig, OwnQwenForCausalLM)

FAMILY = Family(
    "own_qwen",
    "OwnQwenForCausalLM",
    ("megatron.bridge.models.qwen.qwen2_bridge", "own_qwen_bridge"),
    name="a fork of Qwen2",
    attention="grouped queries with biases",
    mlp="dense",
    refused="use_sliding_window, scaled rotary embedding",
)
