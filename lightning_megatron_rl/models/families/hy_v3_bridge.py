"""HunYuan V3 for Megatron-Bridge 0.6.2, which reads `first_k_dense_replace`: Transformers has `mlp_layer_types`."""

from typing import Any

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.hy_v3.hy_v3_bridge import HYV3Bridge
from megatron.core.models.gpt.gpt_model import GPTModel


@MegatronModelBridge.register_bridge(source="HYV3ForCausalLM", target=GPTModel, model_type="hy_v3")
class LayerTypesHYV3Bridge(HYV3Bridge):
    """The converter of Megatron-Bridge, for which dense layers are those that Transformers makes dense."""

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Megatron's settings for the model of a Hugging Face checkpoint."""
        config = hf_pretrained.config
        config.first_k_dense_replace = config.mlp_layer_types.count("dense")
        provider = super().provider_bridge(hf_pretrained)
        provider.moe_layer_freq = [int(kind == "sparse") for kind in config.mlp_layer_types]
        return provider
