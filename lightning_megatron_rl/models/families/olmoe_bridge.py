"""OLMoE for Megatron-Bridge 0.6.2: also single experts."""

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.olmoe.olmoe_bridge import OlMoEBridge
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import OlmoeForCausalLM

from lightning_megatron_rl.models.families.single_experts_bridge import with_single_experts


@MegatronModelBridge.register_bridge(source=OlmoeForCausalLM, target=GPTModel, model_type="olmoe")
class OlmoeBridge(OlMoEBridge):
    """The converter of Megatron-Bridge, with what is said above."""

    def mapping_registry(self) -> MegatronMappingRegistry:
        """Where each weight goes."""
        return with_single_experts(super().mapping_registry())
