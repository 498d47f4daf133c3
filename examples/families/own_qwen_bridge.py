"""How the weights and the config of own_qwen.py become Megatron's: as those of Qwen2.

It is imported after Megatron-Bridge; own_qwen.py must not do that itself.
"""

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.qwen.qwen2_bridge import Qwen2Bridge
from megatron.core.models.gpt.gpt_model import GPTModel


@MegatronModelBridge.register_bridge(source="OwnQwenForCausalLM", target=GPTModel, model_type="own_qwen")
class OwnQwenBridge(Qwen2Bridge):
    """Overrides `provider_bridge` (config) or `mapping_registry` (weights) where a fork differs."""
