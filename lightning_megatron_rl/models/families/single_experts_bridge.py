"""Names of experts that stand one by one, for converters of Megatron-Bridge that know grouped ones only.

Transformer Engine keeps the experts of a layer in one module (`experts.linear_fc1.weight0`, `weight1`, ...); layers of
torch modules have one module for each (`experts.local_experts.0.linear_fc1.weight`).
"""

from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry

_GROUPED, _SINGLE = ".experts.linear_fc", ".experts.local_experts.*.linear_fc"


def with_single_experts(registry: MegatronMappingRegistry) -> MegatronMappingRegistry:
    """Return a converter's names with those of single experts: the same weights of the checkpoint, as often."""
    found: list[Any] = registry.get_all_mappings()
    for mapping in registry.get_all_mappings():
        name = mapping.megatron_param
        if _GROUPED in name and name.endswith(".weight*"):
            single = name.replace(_GROUPED, _SINGLE).removesuffix("*")
            theirs = mapping.hf_param if isinstance(mapping.hf_param, dict) else {"hf_param": mapping.hf_param}
            found.append(type(mapping)(megatron_param=single, **theirs))
    return MegatronMappingRegistry(*found)
