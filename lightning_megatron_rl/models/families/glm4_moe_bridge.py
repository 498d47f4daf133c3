"""GLM-4.5 for Megatron-Bridge 0.6.2: also single experts, and all shared experts instead of one."""

from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.glm.glm45_bridge import GLM45Bridge
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import Glm4MoeForCausalLM

from lightning_megatron_rl.models.families.single_experts_bridge import with_single_experts


@MegatronModelBridge.register_bridge(source=Glm4MoeForCausalLM, target=GPTModel, model_type="glm4_moe")
class Glm4MoeBridge(GLM45Bridge):
    """The converter of Megatron-Bridge, with what is said above."""

    def mapping_registry(self) -> MegatronMappingRegistry:
        """Where each weight goes."""
        return with_single_experts(super().mapping_registry())

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Megatron's settings for the model of a Hugging Face checkpoint."""
        provider = super().provider_bridge(hf_pretrained)
        config = hf_pretrained.config
        provider.moe_shared_expert_intermediate_size = config.n_shared_experts * config.moe_intermediate_size
        return provider
