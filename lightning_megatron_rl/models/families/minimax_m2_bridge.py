"""MiniMax-M2 for Megatron-Bridge 0.6.2: also single experts, and norms of queries and keys whole on every rank.

Bridge splits these norms over tensor-parallel ranks, and Megatron then sums the gradients of different parts: it sums
those of all norms of queries and keys. `TorchAllHeadsNorm` is whole on every rank.
"""

from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.bridge.models.minimax_m2.minimax_m2_bridge import MiniMaxM2Bridge
from megatron.core.models.gpt.gpt_model import GPTModel

from lightning_megatron_rl.models.families.single_experts_bridge import with_single_experts


@MegatronModelBridge.register_bridge(source="MiniMaxM2ForCausalLM", target=GPTModel, model_type="minimax_m2")
class SingleExpertsMiniMaxM2Bridge(MiniMaxM2Bridge):
    """The converter of Megatron-Bridge, with what is said above."""

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Megatron's settings for the model of a Hugging Face checkpoint."""
        provider = super().provider_bridge(hf_pretrained)
        provider.rotary_percent = hf_pretrained.config.rope_parameters.get("partial_rotary_factor", 1.0)
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        """Where each weight goes."""
        names = {f"decoder.layers.*.self_attention.{one}_layernorm.weight": one for one in "qk"}
        kept = [each for each in super().mapping_registry().get_all_mappings() if each.megatron_param not in names]
        norms = [
            AutoMapping(megatron_param=name, hf_param=f"model.layers.*.self_attn.{one}_norm.weight")
            for name, one in names.items()
        ]
        return with_single_experts(MegatronMappingRegistry(*kept, *norms))
