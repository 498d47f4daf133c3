"""Whether a model is supported, and which of its sizes a layout must divide, by its Hugging Face config."""

from collections.abc import Mapping
from math import prod
from typing import Any

from lightning_megatron_rl.models.families.family import Rope
from lightning_megatron_rl.models.families.refused import refuse_architectures
from lightning_megatron_rl.models.families.registry import FAMILIES
from lightning_megatron_rl.models.families.sampler_keys import only_vllm, refuse_sampler_keys
from lightning_megatron_rl.planner.divisibility import DividedExperts, DividedSizes


def check_family(config: Any) -> None:
    """Raise `ValueError` if the architecture of Hugging Face `config`, or a part of it, is not supported."""
    architectures = config.architectures or []
    refuse_architectures(architectures)
    supported = [family.architecture for family in FAMILIES.values()]
    if not set(architectures) & set(supported):
        raise ValueError(f"model architecture {architectures} is not supported; supported are {', '.join(supported)}")
    model_type = config.model_type
    if model_type not in FAMILIES or FAMILIES[model_type].architecture not in architectures:
        raise ValueError(
            f"config.json says architectures={architectures}, and Transformers reads it as a model of type"
            f" {model_type!r}: these do not belong together, or are not supported together. Supported are "
            + ", ".join(f"{family.architecture} of type {name!r}" for name, family in FAMILIES.items())
        )
    refuse_sampler_keys(config)
    family = FAMILIES[model_type]
    rope = config.rope_parameters or {}
    if not family.rope.layers:
        _check_rope(model_type, rope, family.rope.types, family.rope)
    for kind, types in family.rope.layers.items():
        if not isinstance(rope.get(kind), dict):
            raise ValueError(f"{family.name} with rope_parameters={rope}: it has no entry for {kind}")
        _check_rope(f"{model_type} ({kind})", rope[kind], types, family.rope)
    experts = family.experts
    if experts and config.num_experts_per_tok == 1 and experts.softmax_over_chosen(config):
        raise ValueError(
            f"num_experts_per_tok=1 of a {model_type} model is not supported: the weights of the chosen experts are a"
            " softmax over these alone, which Megatron does not have for one expert"
        )
    if getattr(config, "use_sliding_window", False):
        raise ValueError("use_sliding_window=true is not supported: set it to false in the model's config.json")
    name, expected = family.activation
    if getattr(config, name) != expected:
        raise ValueError(
            f"activation {getattr(config, name)!r} of a {model_type} model is not supported, only {expected!r}"
        )
    if any(getattr(config, name) for name in family.no_place_for):
        raise ValueError(
            f"{model_type} with {' or '.join(family.no_place_for)} is not supported: there is no place for these"
            " weights"
        )
    family.check(config)


def _check_rope(model: str, rope: Mapping[str, Any], types: tuple[str, ...], known: Rope) -> None:
    """The kind of rotary embedding must be one that Megatron computes as Transformers does."""
    rope_type = rope.get("rope_type", "default")
    if rope_type not in types:
        raise ValueError(f"rope_type={rope_type!r} of a {model} model is not supported")
    share = rope.get("partial_rotary_factor")
    if rope_type == "default" and not known.partial and share not in (None, 1):  # scaled ones are partial everywhere
        raise ValueError(only_vllm(f"partial_rotary_factor={share}", model))
    for name, value in known.constants.get(rope_type, {}).items():
        if rope.get(name) != value:
            raise ValueError(f"{rope_type} rope scaling with {name}={rope.get(name)}: Megatron has {value} built in")
    for name in sorted(set(rope) - known.keys.get(rope_type, set(rope))):
        raise ValueError(
            f"{rope_type} rope scaling of a {model} model with {name}={rope[name]}: vLLM does not read it, and would"
            " sample another model than is trained. Remove it from config.json if it has the default's value"
        )


def divided_sizes(config: Any) -> DividedSizes:
    """Return the sizes of the model of a Hugging Face config that ranks share."""
    family = FAMILIES[config.model_type]
    experts = family.experts
    return DividedSizes(
        model_type=config.model_type,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        num_hidden_layers=config.num_hidden_layers,
        widths={
            " x ".join(names): prod(getattr(config, name) for name in names) for names in family.tensor_parallel_sizes
        },
        experts=None
        if experts is None
        else DividedExperts(
            count=(experts.count, getattr(config, experts.count)),
            width=(experts.width, getattr(config, experts.width)),
            can_be_split=experts.can_be_split,
        ),
    )
