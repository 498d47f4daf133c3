"""Mixtral for Megatron-Bridge, whose version 0.6.2 has no bridge for it; importing this module registers one."""

from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping, QKVMapping
from megatron.core.models.gpt.gpt_model import GPTModel

# Megatron's names -> those of hub checkpoints and of `save_pretrained`; "*" stands for a layer.
_SAME_SHAPE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "decoder.layers.*.self_attention.linear_qkv.layer_norm_weight": "model.layers.*.input_layernorm.weight",
    "decoder.layers.*.self_attention.linear_proj.weight": "model.layers.*.self_attn.o_proj.weight",
    "decoder.layers.*.pre_mlp_layernorm.weight": "model.layers.*.post_attention_layernorm.weight",
    "decoder.layers.*.mlp.router.weight": "model.layers.*.block_sparse_moe.gate.weight",
}
_EXPERT = "model.layers.*.block_sparse_moe.experts.*"


@MegatronModelBridge.register_bridge(source="MixtralForCausalLM", target=GPTModel, model_type="mixtral")
class MixtralBridge(MegatronModelBridge):
    """Conversion of MixtralForCausalLM (Jiang et al. 2024): Mistral's attention, a softmax over the chosen experts."""

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Megatron's settings for the model of a Hugging Face checkpoint."""
        provider = super().provider_bridge(hf_pretrained)
        config = hf_pretrained.config
        provider.normalization = "RMSNorm"
        provider.gated_linear_unit = True
        provider.add_bias_linear = False
        provider.add_qkv_bias = False
        provider.hidden_dropout = 0.0
        provider.moe_ffn_hidden_size = config.intermediate_size
        provider.moe_router_pre_softmax = False  # softmax over the logits of the chosen experts
        provider.moe_router_load_balancing_type = "aux_loss"
        provider.moe_grouped_gemm = True
        provider.moe_permute_fusion = True
        provider.moe_token_dispatcher_type = "alltoall"
        if config.sliding_window is not None:
            provider.window_size = (config.sliding_window - 1, 0)
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        """Where each weight goes; experts exist one by one and, with Transformer Engine, grouped."""
        mappings = [AutoMapping(megatron_param=ours, hf_param=theirs) for ours, theirs in _SAME_SHAPE.items()]
        query, key, value = (f"model.layers.*.self_attn.{name}_proj.weight" for name in "qkv")
        mappings.append(
            QKVMapping(megatron_param="decoder.layers.*.self_attention.linear_qkv.weight", q=query, k=key, v=value)
        )
        for fc1, fc2 in (
            ("local_experts.*.linear_fc1.weight", "local_experts.*.linear_fc2.weight"),
            ("linear_fc1.weight*", "linear_fc2.weight*"),
        ):
            mappings += [
                GatedMLPMapping(
                    megatron_param=f"decoder.layers.*.mlp.experts.{fc1}",
                    gate=f"{_EXPERT}.w1.weight",
                    up=f"{_EXPERT}.w3.weight",
                ),
                AutoMapping(megatron_param=f"decoder.layers.*.mlp.experts.{fc2}", hf_param=f"{_EXPERT}.w2.weight"),
            ]
        return MegatronMappingRegistry(*mappings)
