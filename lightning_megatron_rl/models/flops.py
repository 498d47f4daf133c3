"""How many floating-point operations a sequence costs a model, from Megatron's own config."""

from typing import Any


def sequence_flops(config: Any, vocab_size: int) -> tuple[float, float]:
    """Return `(linear, quadratic)`: a forward pass over n tokens takes ``linear * n + quadratic * n**2`` operations.

    Two per multiplication with a weight that a token meets (of an MoE layer: the experts it is routed to), and causal
    attention, where half of the scores are computed. `config` is a `TransformerConfig`; the backward pass takes twice
    as much again.

    Example:
        Hidden 64, one layer, 4 heads of 16, no GQA, MLP 128 gated, vocabulary 100:
        ``linear = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 64 * 100)``, ``quadratic = 2 * 64``.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    if config.multi_latent_attention:
        key, value = config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
        query = (hidden + heads * key) * config.q_lora_rank if config.q_lora_rank else hidden * heads * key
        latent = config.kv_lora_rank * (hidden + heads * (config.qk_head_dim + value))
        attention = query + latent + hidden * config.qk_pos_emb_head_dim + heads * value * hidden
    else:
        key = value = config.kv_channels
        groups = config.num_query_groups or heads
        attention = 2 * hidden * key * (heads + groups)
    matrices = 3 if config.gated_linear_unit else 2
    dense = matrices * hidden * config.ffn_hidden_size
    layers = config.num_layers
    moe_layers = _moe_layers(config)
    routed = matrices * hidden * (config.moe_ffn_hidden_size or 0) * config.moe_router_topk
    shared = matrices * hidden * (config.moe_shared_expert_intermediate_size or 0)
    weights = layers * attention + (layers - moe_layers) * dense + moe_layers * (routed + shared) + hidden * vocab_size
    return 2.0 * weights, float(layers * heads * (key + value))


def _moe_layers(config: Any) -> int:
    """Layers with experts; `moe_layer_freq` is a list of 0 and 1, or every so-manieth layer."""
    if not config.num_moe_experts:
        return 0
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return len(range(0, config.num_layers, frequency))
    return sum(frequency)
